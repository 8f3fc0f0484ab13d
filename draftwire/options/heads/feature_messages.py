"""Encoding of features of the target's tokens, and of what drafters ask for."""

from draftwire.options.heads.feature_format import FeatureEncoding
from draftwire.options.heads.features import FeatureRequest, SessionFeatures
from draftwire.runtime.codec import Conversion, converters, enumeration, members_of
from draftwire.runtime.messages import permit_from_proto, permit_to_proto
from draftwire.v1 import verifier_pb2

_ENCODING = enumeration(members_of(FeatureEncoding, verifier_pb2.FeatureEncoding), "unknown encoding {} of features")

feature_request_to_proto, feature_request_from_proto = converters(
    FeatureRequest, verifier_pb2.FeatureRequest, permit=Conversion(permit_to_proto, permit_from_proto)
)
features_to_proto, features_from_proto = converters(SessionFeatures, verifier_pb2.SessionFeatures)
"""The sizes of features are not checked."""


def feature_source_to_proto(fingerprint: bytes, encoding: FeatureEncoding) -> verifier_pb2.FeatureSource:
    """Encodes which features a drafter needs."""
    return verifier_pb2.FeatureSource(fingerprint=fingerprint, encoding=_ENCODING.encode(encoding))


def feature_encoding_from_proto(message: verifier_pb2.FeatureSource) -> FeatureEncoding:
    """Decodes how features are to be sent.

    Raises:
        InvalidRequestError: the encoding is unknown.
    """
    encoding: FeatureEncoding = _ENCODING.decode(message.encoding)
    return encoding
