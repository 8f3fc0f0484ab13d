"""Keys of different roles, and of different seeds, are different: a drafter's says nothing about the verifier's."""

from draftwire.keys import KEY_BYTES, MAX_SEED, Role, derive_key


def test_no_two_roles_or_seeds_share_a_key() -> None:
    keys = {derive_key(seed, role) for seed in (0, 1, MAX_SEED) for role in Role}
    assert len(keys) == 3 * len(Role)
    assert {len(key) for key in keys} == {KEY_BYTES}
