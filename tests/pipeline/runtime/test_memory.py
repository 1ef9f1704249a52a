from __future__ import annotations

import pytest

from pipeline.memory import memory_traces
from pipeline.passes import add_communication, bpipe
from pipeline.program import chain
from pipeline.schedules import one_f_one_b
from tests.pipeline.runtime.pool import Pool
from tests.pipeline.runtime.test_numerics import OTHER_ORDER, SAME_ORDER

PROGRAMS = SAME_ORDER | OTHER_ORDER


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_bytes_held_are_those_predicted_at_every_action(name, four):
    program = add_communication(PROGRAMS[name])
    results = four.run("train_with", str(program), 2, {"tokens": False})
    predicted = memory_traces(program, results[0]["costs"])
    for rank, result in enumerate(results):
        assert result["held"] == [predicted[rank], predicted[rank]]


@pytest.mark.slow
def test_bpipe_takes_one_micro_batch_of_resident_memory_from_the_first_stage(monkeypatch):
    # What is freed goes back to the system at once, so that resident memory follows what is held.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    micro_batch = 1000 * 3000 * 8
    plain = one_f_one_b(chain(8, [1, 1, 1, 1]))
    pool = Pool(4)
    try:
        before = pool.run("resident", str(add_communication(plain)))
        after = pool.run("resident", str(add_communication(bpipe(plain))))
    finally:
        pool.stop()
    print("held, resident bytes of each rank; 1F1B:", before, "BPipe:", after)
    assert [round(held / micro_batch) for held, _ in before] == [4, 3, 2, 1]
    assert [round(held / micro_batch) for held, _ in after] == [3, 3, 2, 3]
    for held, resident in (*before, *after):
        assert resident == pytest.approx(held, rel=0.05)
    assert before[0][1] - after[0][1] == pytest.approx(micro_batch, rel=0.05)
