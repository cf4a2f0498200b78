"""Row deltas of a query's result lead from the old rows to the new ones."""

from __future__ import annotations

from random import Random

from headwater.client.state.replica import Replica
from headwater.queries.row_deltas import Rows, entering, steps
from tests.support.generators.sizes import first_seed, size


def test_generated_results_are_folded() -> None:
    random = Random(first_seed(1))
    for _ in range(size("row_deltas", 500, large=50_000)):
        old: Rows = {(key,): {"id": key, "n": 0} for key in random.sample(range(12), k=8)}
        keys = random.sample(range(12), k=random.randrange(10))
        if random.random() < 0.7:  # Most results keep most of their order.
            keys = [key for (key,) in old if random.random() < 0.8]
            for _ in range(random.randrange(3)):
                keys.insert(random.randrange(len(keys) + 1), random.randrange(12, 99))
            keys = list(dict.fromkeys(keys))
            if len(keys) > 2 and random.random() < 0.5:
                keys.insert(random.randrange(len(keys)), keys.pop(random.randrange(len(keys))))
        new: Rows = {(key,): {"id": key, "n": random.choice((0, 0, 1))} for key in keys}
        replica = Replica()
        replica.apply(entering(old))
        found = steps(old, new)
        assert found is not None
        replica.apply(found)
        assert [dict(row) for row in replica.rows] == list(new.values())
