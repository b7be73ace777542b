"""Benchmarks that remember: what is kept, where, and when a ratio counts as worse."""

import bench_all as bench


def _report(date="2026-01-02", **ratios):
    contests = {
        name: {"ratio": middle, "quartiles": [low, high]}
        for name, (low, middle, high) in ratios.items()
    }
    return {"device": "CPU, 2 cores (x86_64)", "date": date, "contests": contests}


def test_worse_is_beyond_the_spread_of_both():
    before = _report(noise=(0.9, 1.0, 1.1), account=(0.01, 0.02, 0.03))
    assert not bench.worse(before, _report(noise=(1.05, 1.3, 1.4), account=(0.001, 0.002, 0.003)))
    assert not bench.worse(before, _report(noise=(1.1, 1.3, 1.4)))
    found = bench.worse(before, _report(noise=(1.11, 1.3, 1.4), account=(0.02, 0.04, 0.06)))
    assert set(found) == {"noise"} and "1.3 (1.11 to 1.4), was 1 (0.9 to 1.1)" in found["noise"]
    # no number is no better; what was left out on either side says nothing
    assert bench.worse(before, _report(noise=(float("nan"),) * 3))
    before["contests"]["torch"] = {"left_out": "not installed"}
    assert not bench.worse(before, _report(torch=(9.0, 9.0, 9.0)))


def test_a_contests_ratio_is_the_median_of_pairs_in_turn():
    order, ours = [], iter([50.0, 1.0, 2.0, 3.0])

    def first():
        order.append("ours")
        return next(ours)

    def second():
        order.append("theirs")
        return 4.0

    found = bench.measured(bench.Contest(first, second, {"told": 1}), rounds=3)
    assert found["ratio"] == 0.5 and found["quartiles"] == [0.375, 0.625]  # not the first, 50
    assert found["cpu_seconds"] == [2.0, 4.0] and found["told"] == 1
    assert order[2:] == ["theirs", "ours", "ours", "theirs", "theirs", "ours"]
