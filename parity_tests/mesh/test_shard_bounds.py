"""A split that has what was wanted takes no more rows while the other one fills."""

import pyarrow as pa

from jax_grpo.chess.data.shards import Source, write_shards


def test_each_split_has_exactly_what_was_wanted(tmp_path):
    def batches(start: int):
        yield from [[{"key": f"h{n}"}, {"key": f"t{n}"}] for n in range(start, 9)]

    source = Source(pa.schema([("key", pa.string())]), {}, batches, lambda row: row["key"])
    wanted = {"heldout": 2, "train": 5}
    *_, done = write_shards(tmp_path, source, lambda key, row: "heldout" if key[0] == "h" else "train", wanted, 100)
    assert done.rows == wanted and done.finished
