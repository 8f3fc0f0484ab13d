"""Free blocks: each is given to one text, and the blocks of a text follow each other."""

import random
from itertools import pairwise

from draftwire.models.free_blocks import FreeBlocks


def num_runs(blocks: list[int]) -> int:
    return 1 + sum(after != before + 1 for before, after in pairwise(blocks))


def test_blocks_are_given_out_once_and_come_back_in_any_order() -> None:
    """Whatever is asked for and freed, beside a set."""
    generator = random.Random(1)
    for num_blocks in (1, 2, 7, 64):
        free, expected = FreeBlocks(num_blocks), set(range(1, num_blocks + 1))
        held: list[int] = []
        for _ in range(2000):
            if held and generator.random() < 0.5:
                generator.shuffle(held)
                count = generator.randint(1, len(held))
                free.put(held[:count])
                expected.update(held[:count])
                del held[:count]
            elif expected:
                last = generator.choice([None, *held])
                taken = free.take(last, generator.randint(1, len(expected)))
                assert expected.issuperset(taken)
                if last is not None and last + 1 in expected:
                    assert taken[0] == last + 1
                expected.difference_update(taken)
                held += taken
            assert len(free) == len(expected)
            assert sorted(free) == sorted(expected)
        assert len(free._sizes) <= 2 * len(free._ends) + 64, "what is known of gaps that are gone does not add up"


def test_texts_that_grow_in_turn_stay_in_one_run_while_there_is_room() -> None:
    free = FreeBlocks(256)
    texts = [free.take(None, 4) for _ in range(8)]
    for _ in range(12):
        for text in texts:
            text += free.take(text[-1], 1)
    assert [num_runs(text) for text in texts] == [1] * 8


def test_text_without_a_gap_of_its_size_is_in_the_fewest_possible_runs() -> None:
    free = FreeBlocks(100)
    whole = free.take(None, 100)
    assert sorted(whole) == list(range(1, 101))
    free.put(range(1, 21))
    free.put(range(31, 61))
    assert num_runs(free.take(None, 30)) == 1, "the largest gap holds it"
    assert sorted(free.take(None, 20)) == list(range(1, 21))
    assert len(free) == 0


def test_end_of_a_text_that_is_dropped_and_grown_again_is_where_it_was() -> None:
    """As at every rejected draft token."""
    free = FreeBlocks(256)
    text, other = free.take(None, 5), free.take(None, 5)
    for _ in range(20):
        free.put([text.pop(), text.pop()])
        text += free.take(text[-1], 2)
        other += free.take(other[-1], 1)
    assert num_runs(text) == num_runs(other) == 1
