from distap import stopwatch
from distap.stopwatch import Stopwatch


class Clock:
    """Time that passes when told to."""

    now = 0.0

    def perf_counter(self):
        return self.now


def test_seconds_count_once_for_the_innermost_stage(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stopwatch, "time", clock)
    watch = Stopwatch()
    with watch.stage("replay"):
        clock.now += 1
        with watch.stage("data_wait"):
            clock.now += 2
        with watch.stage("network", part_of_outer=True):
            clock.now += 4
            with watch.stage("inner"):
                clock.now += 8
            clock.now += 13
            with watch.stage("reduce"):
                clock.now += 3
    # network is counted within replay as well, what passed in stages inside it is not
    assert watch.seconds == {"data_wait": 2, "inner": 8, "reduce": 3, "network": 17, "replay": 18}
    assert sum(watch.seconds.values()) - watch.seconds["network"] == clock.now
