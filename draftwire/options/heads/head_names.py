"""Names of the kinds of draft heads. No torch here: gateways and the command line import them."""

from enum import StrEnum


class HeadKind(StrEnum):
    """Kind of a head."""

    EAGLE = "eagle"
    """EAGLE-1 and 2: decoder layers over the last hidden states; they predict the next one, from which the
    target's output layer computes logits."""
    EAGLE3 = "eagle3"
    """A decoder layer over hidden states of several layers, with an output layer of its own."""
    MEDUSA = "medusa"
    """An MLP for each draft token, over the last hidden state; draft tokens do not see each other."""
    HYDRA = "hydra"
    """An MLP for each draft token as in Medusa, which sees the draft tokens before its own."""
    MTP = "mtp"
    """A target's own multi-token-prediction layer: a decoder layer over the last hidden states, with norms around it;
    the target's output layer computes logits."""


WITH_LAYERS = (HeadKind.EAGLE, HeadKind.EAGLE3, HeadKind.MTP)
"""Kinds with decoder layers, and so with a KV cache."""

HEAD_NAMES = tuple(kind.value for kind in HeadKind)
"""Names by which a verifier offers the drafts of its own head."""
