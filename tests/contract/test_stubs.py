"""Every method of the protos is implemented, and everything in them is explained."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor, MethodDescriptor, ServiceDescriptor

from draftwire.runtime.model_service import ModelServicer
from draftwire_drafter.server import DrafterServicer
from draftwire_gateway.server import GatewayServicer
from draftwire_verifier.server import VerifierServicer

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "protos" / "draftwire" / "v1").glob("*.proto"))
EVERY_PROTO = pytest.mark.parametrize("proto", PROTOS, ids=[path.stem for path in PROTOS])

SERVICERS: dict[str, type] = {
    "draftwire.v1.DrafterService": DrafterServicer,
    "draftwire.v1.GatewayService": GatewayServicer,
    "draftwire.v1.ModelService": ModelServicer,
    "draftwire.v1.VerifierService": VerifierServicer,
}

DECLARATION = re.compile(
    r"^(?:(?P<kind>message|enum|service|oneof|rpc)\s+(?P<name>\w+)"  # message Fence {
    r"|(?:(?:optional|repeated)\s+)?(?:map<.*>|[\w.]+)\s+(?P<field>\w+)\s*=\s*\d+"  # repeated uint32 token_ids = 5;
    r"|(?P<value>[A-Z0-9_]+)\s*=\s*\d+)"  # FINISH_REASON_STOP = 1;
)


def descriptor_of(proto: Path) -> FileDescriptor:
    return importlib.import_module(f"draftwire.v1.{proto.stem}_pb2").DESCRIPTOR


def methods() -> Iterator[MethodDescriptor]:
    for proto in PROTOS:
        for service in descriptor_of(proto).services_by_name.values():
            yield from service.methods


def declarations(text: str) -> Iterator[tuple[str, bool]]:
    """Yields the name of everything that a proto declares, and whether the line above it is a comment."""
    above = ""
    for line in map(str.strip, text.splitlines()):
        found = DECLARATION.match(line)
        if found and not line.startswith(("syntax", "package", "import", "option ")):
            name = found["name"] or found["field"] or found["value"]
            yield name, above.startswith("//") and bool(above.strip("/ "))
        above = line


def declared(part: FileDescriptor | Descriptor | EnumDescriptor | ServiceDescriptor) -> Iterator[str]:
    """Yields the names of everything inside a descriptor."""
    if isinstance(part, EnumDescriptor):
        yield from (value.name for value in part.values)
    elif isinstance(part, ServiceDescriptor):
        yield from (method.name for method in part.methods)
    else:
        inner = [*part.enum_types_by_name.values()]
        if isinstance(part, FileDescriptor):
            inner += [*part.message_types_by_name.values(), *part.services_by_name.values()]
        else:
            yield from (field.name for field in part.fields)
            # An `optional` field is a oneof of its own to protobuf.
            yield from (oneof.name for oneof in part.oneofs if not oneof.name.startswith("_"))
            inner += [child for child in part.nested_types if not child.GetOptions().map_entry]
        for child in inner:
            yield child.name
            yield from declared(child)


METHODS = list(methods())


def test_every_service_has_a_servicer() -> None:
    assert {method.containing_service.full_name for method in METHODS} == set(SERVICERS)


@pytest.mark.parametrize("method", METHODS, ids=[method.full_name for method in METHODS])
def test_every_method_is_implemented_by_a_coroutine(method: MethodDescriptor) -> None:
    service = method.containing_service
    stem = Path(service.file.name).stem
    generated = getattr(importlib.import_module(f"draftwire.v1.{stem}_pb2_grpc"), f"{service.name}Servicer")
    servicer = SERVICERS[service.full_name]
    assert issubclass(servicer, generated)
    ours = getattr(servicer, method.name)
    assert ours is not getattr(generated, method.name)
    assert inspect.iscoroutinefunction(ours)  # the interceptor awaits it; a generator would be refused


@EVERY_PROTO
def test_parser_of_this_test_finds_every_declaration(proto: Path) -> None:
    found = sorted(name for name, _ in declarations(proto.read_text()))
    assert found == sorted(declared(descriptor_of(proto)))


@EVERY_PROTO
def test_every_message_field_value_and_method_has_a_comment_above_it(proto: Path) -> None:
    assert [name for name, explained in declarations(proto.read_text()) if not explained] == []


def test_comment_that_is_missing_empty_or_not_directly_above_is_noticed() -> None:
    text = "// Why.\nmessage A {\n  uint32 b = 1;\n  // Why.\n\n  repeated C d = 2;\n  //\n  optional string e = 3;\n}"
    assert list(declarations(text)) == [("A", True), ("b", False), ("d", False), ("e", False)]
