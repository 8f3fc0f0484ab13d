"""Responses of POST /v1/responses, as a whole and as events."""

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from draftwire_gateway.http.choice_deltas import ChoiceDelta, Ending
from draftwire_gateway.http.openai_types import Object, ResponseWriter, event
from draftwire_gateway.http.responses_body import ResponsesBody
from draftwire_gateway.http.usage import metrics_of, usage_of
from draftwire_gateway.text.tool_call_reader import CallDelta


class ResponsesWriter:
    """Serialises the response to one request. Nothing of it is stored."""

    def __init__(self, body: ResponsesBody) -> None:
        self._head = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model,
            "instructions": body.instructions or None,
            "max_output_tokens": body.max_output_tokens,
            **{name: getattr(body, name) for name in ("temperature", "top_p")},
            "text": {"format": {"type": "text" if body.text.format is None else body.text.format.type}},
            "tools": [_described(tool.model_dump()) for tool in body.tools],
            "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "background": False,
            "store": False,
            "truncation": "disabled",
            "service_tier": "default",
            "metadata": {},
            "error": None,
        }
        self._num_events = 0
        self._items: list[Object] = []
        """Parts of the output, the last of which may still grow."""
        self._is_open = False
        """Whether it does."""
        self._reason = ""

    def answer(self, deltas: Sequence[ChoiceDelta], endings: Sequence[Ending]) -> Iterator[str]:
        """Yields the whole response."""
        (delta,) = deltas
        if delta.text or not delta.calls:
            self._items.append(_message(delta.text))
        self._items += map(_call, delta.calls)
        for item in self._items:
            item["status"] = "completed"
        self._items[-1]["status"] = _status(delta.reason)
        self._reason = delta.reason or ""
        yield json.dumps(self._ended(endings), ensure_ascii=False)

    def begin(self) -> bytes:
        """Returns the events before the first text."""
        response = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        events = self._event("response.created", response=response)
        return events + self._event("response.in_progress", response=response)

    def chunk(self, delta: ChoiceDelta) -> bytes:
        """Returns the events of new text and new calls."""
        events = self._text(delta.text) if delta.text else b""
        for call in delta.calls:
            events += self._called(call)
        if delta.reason is not None:
            self._reason = delta.reason
        return events

    def end(self, endings: Sequence[Ending]) -> bytes:
        """Returns the events of the end."""
        events = b"" if self._items else self._text("")
        events += self._close()
        is_complete = _status(self._reason) == "completed"
        name = "response.completed" if is_complete else "response.incomplete"
        return events + self._event(name, response=self._ended(endings))

    def _text(self, text: str) -> bytes:
        events = b""
        if not self._is_open or self._items[-1]["type"] != "message":
            events += self._open(_message(""))
            events += self._of_part("response.content_part.added", part=dict(self._part))
        self._part["text"] += text
        return events + self._of_part("response.output_text.delta", delta=text, logprobs=[])

    def _called(self, call: CallDelta) -> bytes:
        events = self._open(_call(CallDelta(call.index, call.id, call.name, ""))) if call.id else b""
        if call.arguments:
            self._items[-1]["arguments"] += call.arguments
            events += self._of_item("response.function_call_arguments.delta", delta=call.arguments)
        return events

    def _open(self, item: Object) -> bytes:
        events = self._close()
        self._items.append(item)
        self._is_open = True
        shown = {**item, "status": "in_progress", **({"content": []} if item["type"] == "message" else {})}
        return events + self._event("response.output_item.added", output_index=self._place, item=shown)

    def _close(self) -> bytes:
        """Returns the events of the end of the last item."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self._items[-1]
        item["status"] = _status(self._reason or "stop")
        if item["type"] == "message":
            text = self._part["text"]
            events = self._of_part("response.output_text.done", text=text, logprobs=[])
            events += self._of_part("response.content_part.done", part=dict(self._part))
        else:
            arguments, name = item["arguments"], item["name"]
            events = self._of_item("response.function_call_arguments.done", arguments=arguments, name=name)
        return events + self._event("response.output_item.done", output_index=self._place, item=item)

    @property
    def _place(self) -> int:
        return len(self._items) - 1

    @property
    def _part(self) -> Object:
        part: Object = self._items[-1]["content"][0]
        return part

    def _of_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=self._place, **fields)

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        return self._of_item(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event(json.dumps(data, ensure_ascii=False), kind)

    def _ended(self, endings: Sequence[Ending]) -> Object:
        status = _status(self._reason)
        usage = usage_of(endings)
        return {
            **self._head,
            "status": status,
            "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
            "output": self._items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0, **usage["completion_tokens_details"]},
                "total_tokens": usage["total_tokens"],
            },
            "metrics": metrics_of(endings),
        }


Writer = ResponseWriter | ResponsesWriter
"""Serialises the response to one request, as a whole or as server-sent events."""


def _status(reason: str | None) -> str:
    return "incomplete" if reason == "length" else "completed"


def _message(text: str) -> Object:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": _new_id("msg"), "status": "", "role": "assistant", "content": [part]}


def _call(call: CallDelta) -> Object:
    called = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
    return {"type": "function_call", "id": _new_id("fc"), **called, "status": ""}


def _described(tool: Object) -> Object:
    """Returns a tool as it was given."""
    return {**tool, "parameters": json.loads(tool["parameters"] or "null")}


def _new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"
