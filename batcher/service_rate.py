"""The rate at which a window serves, by Little's law, and how far costs are bounds."""

MEMORY = 1 - 1 / 256  # weight that a record keeps in the rate when the next one ends
ENOUGH = 16  # records to measure before the rate is used


class ServiceRate:
    """The rate at which a window of records serves cost, from the time that finished records spent in it.

    By Little's law a window that holds `inside` records of which each stays `mean` seconds lets
    inside / mean of them go per second. The same holds for cost, with the mean taken by cost.
    """

    def __init__(self) -> None:
        self._records = self._seconds = self._cost = self._cost_seconds = 0.0

    @property
    def known(self) -> bool:
        """True once enough has been measured to refuse a record for it."""
        return self._records > ENOUGH

    def learn(self, cost: int, seconds: float, records: int = 1) -> None:
        """Note records of `cost` together that were inside for `seconds`."""
        self._records = self._records * MEMORY + records
        self._seconds = self._seconds * MEMORY + records * seconds
        self._cost = self._cost * MEMORY + cost
        self._cost_seconds = self._cost_seconds * MEMORY + cost * seconds

    def time_to_serve(self, records: int, cost: float, records_inside: int, cost_inside: int) -> float | None:
        """Return the seconds until a cost has left the window; None: nothing has been measured yet."""
        if records <= 0 and cost <= 0:
            return 0.0
        if not self._records or not records_inside:
            return None
        wait = max(0, records) * self._seconds / self._records / records_inside
        if self._cost and cost_inside:
            wait = max(wait, cost * self._cost_seconds / self._cost / cost_inside)
        return wait


class Correction:
    """The mean of corrected over entered cost, of the slots whose cost was corrected."""

    def __init__(self) -> None:
        self._entered = self._corrected = 0.0

    @property
    def ratio(self) -> float:
        """The mean, weighted by cost, of which the latest slots weigh most; 1 before the first."""
        return self._corrected / self._entered if self._entered else 1.0

    def learn(self, entered: int, corrected: int) -> None:
        """Note the cost with which a slot entered, and the cost that replaced it."""
        self._entered = self._entered * MEMORY + entered
        self._corrected = self._corrected * MEMORY + corrected
