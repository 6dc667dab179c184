"""The OpenAPI document at /openapi.json.

What clients may send is described by the very pydantic models that check it, so that it cannot drift; what they get
is written down here, and tests hold answers to it. Knows the routes' words, not what is behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REFERENCE = "#/components/schemas/"
_SUMMARIES = {
    "/v1/completions": "Continue a text, or several.",
    "/v1/chat/completions": "Answer a conversation.",
}
_REFUSALS = {
    "400": "A field is wrong (`param` names it), is not supported, or the request can never fit.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model or route.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The body is not application/json.",
    "421": "The server does not go by the name in the Host header.",
    "429": "The queue is full: see Retry-After.",
    "500": "Generation failed.",
    "503": "Loading, shutting down, overloaded, or without a daemon: see Retry-After.",
    "504": "Not finished in time.",
}
_STRING = {"type": "string"}
_NUMBER = {"type": "integer", "minimum": 0}
_USAGE = {
    "prompt_tokens": _NUMBER,
    "completion_tokens": _NUMBER,
    "total_tokens": _NUMBER,
    "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": _NUMBER}},
}


def _object(required: Mapping[str, object], **optional: object) -> dict[str, Any]:
    return {"type": "object", "properties": {**required, **optional}, "required": list(required)}


_ERROR = _object(
    {
        "error": {
            **_object(
                {
                    "message": {"type": "string", "minLength": 1},
                    "type": _STRING,
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                }
            ),
            "additionalProperties": False,
        }
    }
)
_CARD = _object(
    {
        "id": _STRING,
        "object": {"const": "model"},
        "created": _NUMBER,
        "owned_by": _STRING,
        "max_model_len": _NUMBER,
        "default_sampling_params": {"type": "object"},
    }
)


def _answer(kind: str, content: Mapping[str, object]) -> dict[str, Any]:
    choice = _object(
        {"index": _NUMBER, **content, "finish_reason": _STRING, "logprobs": {"type": ["object", "null"]}},
        token_ids={"type": "array", "items": _NUMBER},
    )
    return _object(
        {
            "id": _STRING,
            "object": {"const": kind},
            "created": _NUMBER,
            "model": _STRING,
            "choices": {"type": "array", "items": choice, "minItems": 1},
            "usage": _object(_USAGE),
        },
        timings={"type": ["object", "array"]},
    )


_ANSWERS = {
    "/v1/completions": _answer("text_completion", {"text": _STRING}),
    "/v1/chat/completions": _answer(
        "chat.completion", {"message": _object({"role": {"const": "assistant"}, "content": _STRING})}
    ),
}


def document(
    model_name: str, requests: Mapping[str, type[BaseModel]], *, max_body_bytes: int, needs_key: bool
) -> dict[str, Any]:
    """The document of one server.

    Args:
        requests: by the path that takes it, what a body is checked with.
    """
    _, definitions = models_json_schema(
        [(model, "validation") for model in requests.values()], ref_template=_REFERENCE + "{model}"
    )
    examples = {
        "/v1/completions": {"model": model_name, "prompt": "The capital of France is", "max_tokens": 8},
        "/v1/chat/completions": {
            "model": model_name,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
        },
    }
    paths: dict[str, Any] = {
        path: {"post": _generation(path, model.__name__, examples[path], max_body_bytes)}
        for path, model in requests.items()
    }
    listed = _object({"object": {"const": "list"}, "data": {"type": "array", "items": _CARD}})
    named = {"name": "model", "in": "path", "required": True, "schema": _STRING, "example": model_name}
    state = {"200": _json("Well.", {"type": "object"}), "503": _json("Not (yet).", {"type": "object"})}
    text = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": _STRING}}}
    paths |= {
        "/v1/models": {"get": _get("The model that is served.", {"200": _json("One.", listed)})},
        "/v1/models/{model}": {
            "get": _get("The model that is served.", {"200": _json("It.", _CARD)}, parameters=[named])
        },
        "/health": {"get": _get("Whether the cluster lives.", state, security=[])},
        "/health/ready": {"get": _get("Whether a request would be worked on now.", state, security=[])},
        "/metrics": {"get": _get("Metrics.", {"200": text})},
    }
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": f"pdctl: {model_name}", "version": version("pdctl")},
        "paths": paths,
        "components": {"schemas": {**definitions.get("$defs", {}), "Error": _ERROR}},
    }
    if needs_key:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _json(description: str, schema: object) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _refusals() -> dict[str, Any]:
    return {status: _json(text, {"$ref": _REFERENCE + "Error"}) for status, text in _REFUSALS.items()}


def _get(summary: str, responses: Mapping[str, object], **more: object) -> dict[str, Any]:
    return {"summary": summary, "responses": {**_refusals(), **responses}, **more}


def _generation(path: str, model: str, example: object, max_body_bytes: int) -> dict[str, Any]:
    answer = _json("The answer; with `stream`, as server-sent events that end with `[DONE]`.", _ANSWERS[path])
    answer["content"]["text/event-stream"] = {"schema": _STRING}
    return {
        "summary": _SUMMARIES[path],
        "requestBody": {
            "required": True,
            "description": f"At most {max_body_bytes} bytes.",
            "content": {"application/json": {"schema": {"$ref": _REFERENCE + model}, "example": example}},
        },
        "responses": {"200": answer, **_refusals()},
    }
