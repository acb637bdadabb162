"""Signals that ask a service to stop."""

import os
import select
import signal


class StopSignals:
    """Handlers for SIGINT, SIGTERM and SIGHUP in this process.

    Attributes:
        asked: Whether a signal has arrived.
        at_once: Whether a Ctrl-C has arrived after the first signal, to cancel the requests in flight.
    """

    def __init__(self) -> None:
        self.asked = False
        self.at_once = False
        self._readable, self._writable = os.pipe()

    def catch(self) -> None:
        """Install the signal handlers."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under `nohup` SIGHUP stays ignored, so that the service outlives the terminal. SIGINT, which
            # shell scripts ignore in background commands, is caught: `saturate stop --now` sends it.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)

    def wait(self, seconds: float) -> bool:
        """Wait for a signal; return whether a signal has arrived, now or earlier."""
        select.select([self._readable], [], [], seconds)
        return self.asked

    def _note(self, number: int, frame: object) -> None:
        # Only Ctrl-C counts twice: a closed terminal sends SIGHUP twice, and process managers repeat SIGTERM.
        self.at_once |= self.asked and number == signal.SIGINT
        if not self.asked:
            self.asked = True
            os.write(self._writable, b"\0")
