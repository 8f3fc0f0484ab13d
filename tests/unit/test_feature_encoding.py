"""Features as bytes: what is lost, and the sizes that a receiver checks."""

from dataclasses import replace

import pytest
import torch

from draftwire.method.keys import KEY_BYTES
from draftwire.method.rounds import Permit
from draftwire.options.heads import feature_messages
from draftwire.options.heads.feature_encoding import decode_rows, encode_rows
from draftwire.options.heads.feature_format import FeatureEncoding
from draftwire.options.heads.features import FeatureNeed, FeatureRequest, SessionFeatures
from draftwire.v1 import verifier_pb2

SIZE = 24
LOSS = {FeatureEncoding.FLOAT32: 0.0, FeatureEncoding.BFLOAT16: 2**-8, FeatureEncoding.FLOAT8: 2**-4}
"""Largest error of a number, relative to it."""
BYTES = {FeatureEncoding.FLOAT32: 4 * SIZE, FeatureEncoding.BFLOAT16: 2 * SIZE, FeatureEncoding.FLOAT8: SIZE + 4}


def rows_of(count: int) -> torch.Tensor:
    """Returns rows whose sizes differ by orders of magnitude, one of them 0, and one with an outlier."""
    rows = (
        torch.randn(count, SIZE, generator=torch.Generator().manual_seed(0))
        * 10.0 ** torch.arange(-2, count - 2)[:, None]
    )
    rows[1] = 0.0
    rows[2, 3] = 1000.0
    return rows


@pytest.mark.parametrize("encoding", FeatureEncoding)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_survive_with_the_loss_of_their_encoding(encoding: FeatureEncoding, dtype: torch.dtype) -> None:
    rows = rows_of(5).to(dtype)
    data, scales = encode_rows(rows, encoding)
    assert len(data) + len(scales) == 5 * BYTES[encoding]
    need = FeatureNeed(b"", encoding, SIZE, 8)
    features = SessionFeatures(1, 0, 3, 5, data, scales)
    assert need.fits(features)
    assert not need.fits(replace(features, num_positions=4))
    assert not need.fits(replace(features, rows=data[1:]))
    assert not need.fits(replace(features, scales=scales + b"0"))
    assert not need.fits(SessionFeatures(1, 0, 3, 0, b""))
    decoded = decode_rows(data, scales, 5, encoding)
    smallest = rows.float().abs().amax(-1, keepdim=True) * 2**-15  # of numbers below, float8 has few digits left
    error = (decoded - rows.float()).abs()
    assert (error <= LOSS[encoding] * rows.float().abs() + smallest * (encoding is FeatureEncoding.FLOAT8)).all()


@pytest.mark.parametrize("first_position", [None, 0, 7])
def test_requests_and_features_survive_the_wire(first_position: int | None) -> None:
    request = FeatureRequest(2**63, 4, Permit(3, bytes(KEY_BYTES)), 900, first_position)
    sent = feature_messages.feature_request_to_proto(request).SerializeToString()
    assert feature_messages.feature_request_from_proto(verifier_pb2.FeatureRequest.FromString(sent)) == request
    features = SessionFeatures(2**63, 4, 17, 2, b"rows", b"scales")
    sent = feature_messages.features_to_proto(features).SerializeToString()
    assert feature_messages.features_from_proto(verifier_pb2.SessionFeatures.FromString(sent)) == features
    for encoding in FeatureEncoding:
        source = feature_messages.feature_source_to_proto(b"f" * 32, encoding)
        assert feature_messages.feature_encoding_from_proto(source) is encoding
