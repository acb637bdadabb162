"""Signals that ask a service to stop."""

import os
import select
import signal


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP of this process, once they are caught.

    Attributes:
        asked: Whether one has come.
        at_once: Whether a second Ctrl-C has come: requests in flight are cut off.
    """

    def __init__(self) -> None:
        self.asked = False
        self.at_once = False
        self._readable, self._writable = os.pipe()

    def catch(self) -> None:
        """Take the signals from now on."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # `nohup` has SIGHUP ignored, and the service outlives the terminal. Scripts have SIGINT ignored
            # by what they start in the background, but `saturate stop --now` sends it.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)

    def wait(self, seconds: float) -> bool:
        """Wait for a signal; return whether one has come, now or earlier."""
        select.select([self._readable], [], [], seconds)
        return self.asked

    def _note(self, number: int, frame: object) -> None:
        # A closed terminal sends SIGHUP twice, and process managers repeat SIGTERM: only Ctrl-C is impatient.
        self.at_once |= self.asked and number == signal.SIGINT
        if not self.asked:
            self.asked = True
            os.write(self._writable, b"\0")
