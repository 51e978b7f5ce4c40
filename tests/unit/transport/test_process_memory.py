"""The process's memory."""

from mqmesh.transport.process_memory import MemoryWatch, anonymous_bytes, give_back
from mqmesh.units import MIB


def test_growth_counts_from_the_lowest_since_somebody_looked_after_it():
    sizes = [100]
    watch = MemoryWatch(lambda: sizes[0])
    sizes[0] = 150
    assert watch.growth == 50
    sizes[0] = 80
    assert watch.growth == 0
    sizes[0] = 100
    assert watch.growth == 20
    watch.settle()
    assert watch.growth == 0


def test_a_block_of_memory_is_seen():
    give_back()  # else the block may stand where freed ones did
    before = anonymous_bytes()
    block = bytearray(b"x") * (64 * MIB)
    assert anonymous_bytes() - before > 16 * MIB
    del block
    give_back()
    assert anonymous_bytes() - before < 16 * MIB
