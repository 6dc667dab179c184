"""The HTTP interface: OpenAI's completions and chat completions, models, health.

Every number and string of a client is checked here, before anything of it reaches a row; every refusal is an
OpenAI error object that names the field as the client sent it. What takes more than some milliseconds to check and
tokenize is read in another process (server/reader.py), by the same code. Knows tokens only through `Tokenizer` and
rows only through `RowClient`; started by router.py, run by tests without a server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from pdctl.core.api_errors import ApiError, encode, error_body, json_response
from pdctl.core.gate import Gate
from pdctl.core.hosts import Hosts
from pdctl.core.keys import ApiKey
from pdctl.core.metrics import Metrics
from pdctl.core.openapi import document
from pdctl.core.requests import RowClient, RowRequest
from pdctl.core.server.answer import Answer, EventStream, Plan, WholeAnswer, no_daemon_error, until_disconnect
from pdctl.core.server.body import MAX_BODY_BYTES, MAX_HELD_BYTES, read_body
from pdctl.core.server.held_bytes import Held, HeldBytes
from pdctl.core.server.prompts import Ids, PromptReader, outside_vocabulary
from pdctl.core.server.reader import Reader, ReaderError, ReaderMemoryError
from pdctl.core.tokenizer import Tokenizer
from pdctl.core.weights.generation import SamplingDefaults
from pdctl.transport.layout import MAX_LOGPROBS, H
from pdctl.transport.rows import RowParams

log = logging.getLogger(__name__)

MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_STOPS = 4
MAX_STOP_CHARS = 1000
MAX_STOP_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_LOGIT_BIAS_VALUE = 100
MAX_CHOICES = 16
# Of completions, as with OpenAI; chats may ask for MAX_LOGPROBS.
MAX_COMPLETION_LOGPROBS = 5
DEFAULT_COMPLETION_TOKENS = 16
REQUEST_TIMEOUT_S = 600.0
# What fits is read on the loop: some 20 ms at worst. The rest, in another process.
INLINE_BODY_BYTES = 16 << 10
_INLINE_PROMPTS = 64
# Larger bodies have a reader of their own: they take it for seconds, and others must not wait that long.
_SHORT_BODY_BYTES = 256 << 10
READ_TIMEOUT_S = 60.0
# Below this a temperature is greedy: dividing by it would leave the range of float32.
_GREEDY_BELOW = 1e-5
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,100}")
_SEED_MASK = (1 << 64) - 1
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

# Of what a client sent, shown to it again.
_MAX_SHOWN_CHARS = 200
# An error a field is enough to name the first.
_MAX_UNKNOWN_FIELDS = 16


# --- what clients may send ---------------------------------------------------------------------------------


def _refuse(message: str) -> PydanticCustomError:
    # Braces in the text would be taken for a template's.
    return PydanticCustomError("refused", "{text}", {"text": message})


def _check_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refuse(f"not valid Unicode: lone surrogate at character {error.start}") from None
    return text


def _check_prompt(value: object) -> list[str | list[int]]:
    """A prompt in any of its four forms, as a list of prompts."""
    wanted = "expected a string, a list of strings, a list of token ids, or a list of lists of token ids"
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise _refuse(wanted)
    if value and type(value[0]) is int:
        value = [value]
    if not value:
        raise _refuse("is empty")
    if len(value) > MAX_PROMPTS:
        raise _refuse(f"{len(value)} prompts: at most {MAX_PROMPTS} in one request")
    prompts: list[str | list[int]] = []
    for prompt in value:
        if type(prompt) is not type(value[0]) or not isinstance(prompt, str | list):
            raise _refuse(wanted)
        if not prompt:
            raise _refuse("is empty")
        if isinstance(prompt, str):
            _check_text(prompt)
        elif not all(type(token) is int for token in prompt):
            raise _refuse(wanted)
        prompts.append(prompt)
    return prompts


def _check_stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _refuse(f"expected a string or a list of up to {MAX_STOPS} strings")
    if len(stops) > MAX_STOPS:
        raise _refuse(f"{len(stops)} stop strings: at most {MAX_STOPS}")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            raise _refuse(f"a stop string has 1 to {MAX_STOP_CHARS} characters, not {len(stop)}")
        _check_text(stop)
    return tuple(stops)


def _check_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """What is added to which ids' logits, by id."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise _refuse('expected an object of token ids and biases, like {"50256": -100}')
    if len(value) > MAX_LOGIT_BIAS:
        raise _refuse(f"{len(value)} entries: at most {MAX_LOGIT_BIAS}")
    found = []
    for token, bias in value.items():
        if not _TOKEN_ID.fullmatch(token):
            raise _refuse(f"{encode(token[:40])} is no token id")
        numeric = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not (numeric and -MAX_LOGIT_BIAS_VALUE <= bias <= MAX_LOGIT_BIAS_VALUE):
            raise _refuse(
                f"the bias of token {token}: expected a number from -{MAX_LOGIT_BIAS_VALUE} to {MAX_LOGIT_BIAS_VALUE}"
            )
        found.append((int(token), float(bias)))
    return tuple(sorted(found))


def _check_content(value: object) -> str | None:
    """A message's text; parts are joined by newlines."""
    if value is None:
        return None
    if isinstance(value, str):
        return _check_text(value)
    if not isinstance(value, list) or not value:
        raise _refuse("expected a string or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or part.keys() != {"type", "text"}:
            raise _refuse('expected parts like {"type": "text", "text": "..."}: only text is supported')
        if not isinstance(part["text"], str):
            raise _refuse("a part's text: expected a string")
        texts.append(_check_text(part["text"]))
    return "\n".join(texts)


def _only(*allowed: object) -> PlainValidator:
    """A parameter that is known but not supported: only values that change nothing."""

    def check(value: object) -> None:
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        for one in allowed:
            if value == one and (type(value) is type(one) or (numeric and not isinstance(one, bool))):
                return
        if value is not None:
            shown = " or ".join(["null", *map(encode, allowed)])
            raise _refuse(f"is not supported yet: expected {shown}")

    return PlainValidator(check, json_schema_input_type=Annotated[Any, WithJsonSchema({"enum": [None, *allowed]})])


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


# What the checks above take, in the words of the OpenAPI document.
_Text = Annotated[str, Field(min_length=1)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_Several = Field(min_length=1, max_length=MAX_PROMPTS)
_Prompt = _Text | _TokenIds | Annotated[list[_Text], _Several] | Annotated[list[_TokenIds], _Several]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS_VALUE, le=MAX_LOGIT_BIAS_VALUE)]
_Biases = dict[Annotated[str, Field(pattern=f"^(?:{_TOKEN_ID.pattern})$")], _Bias]
PromptField = Annotated[Any, PlainValidator(_check_prompt, json_schema_input_type=_Prompt)]
StopField = Annotated[
    Any,
    PlainValidator(
        _check_stop,
        json_schema_input_type=_Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None,
    ),
    Field(validate_default=True),
]
LogitBiasField = Annotated[
    Any,
    PlainValidator(
        _check_logit_bias,
        json_schema_input_type=Annotated[
            _Biases, Field(max_length=MAX_LOGIT_BIAS, json_schema_extra={"additionalProperties": False})
        ]
        | None,
    ),
    Field(validate_default=True),
]
ContentField = Annotated[
    Any,
    PlainValidator(
        _check_content,
        json_schema_input_type=str | Annotated[list[TextPart], Field(min_length=1)] | None,
    ),
]


class StreamOptions(_Strict):
    include_usage: bool | None = None


class _GenerationRequest(_Strict):
    """What completions and chats have in common. null is the same as absent everywhere."""

    model: str | None = None
    max_tokens: Annotated[int | None, Field(ge=1, lt=1 << 31)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, lt=1 << 31)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=1_000_000)] = None
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 64)] = None
    stop: StopField = None
    stop_token_ids: Annotated[list[int] | None, Field(max_length=MAX_STOP_IDS)] = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int | None, Field(ge=0, lt=1 << 31)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    logit_bias: LogitBiasField = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    # Wide enough for everybody, and no logit leaves the range of float32.
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100)] = None
    n: Annotated[int | None, Field(ge=1, le=MAX_CHOICES)] = None
    best_of: Annotated[int | None, Field(ge=1)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    timings: bool | None = None
    # Taken and not used.
    user: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        num_choices = self.n or 1
        if self.best_of not in (None, num_choices):
            raise ApiError(
                400,
                f"best_of {self.best_of}: answers are not ranked, expected null or n ({num_choices})",
                param="best_of",
                code="invalid_value",
            )
        return num_choices

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to tell with each token; None: no log-probabilities."""
        return None

    @property
    def output_limit(self) -> tuple[int | None, str]:
        """Output tokens asked for, and the name of the field that did."""
        if self.max_completion_tokens is None:
            return self.max_tokens, "max_tokens"
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise ApiError(
                400,
                f"max_completion_tokens {self.max_completion_tokens} and max_tokens {self.max_tokens} differ",
                param="max_completion_tokens",
            )
        return self.max_completion_tokens, "max_completion_tokens"


class CompletionRequest(_GenerationRequest):
    prompt: PromptField
    logprobs: Annotated[int | None, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] = None
    # Known and not supported yet.
    echo: Annotated[Any, _only(False)] = None
    suffix: Annotated[Any, _only("")] = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: ContentField = None
    name: str | None = None
    # What clients send back of an answer that had none of it.
    refusal: Annotated[Any, _only()] = None
    tool_calls: Annotated[Any, _only([])] = None
    function_call: Annotated[Any, _only()] = None
    audio: Annotated[Any, _only()] = None
    annotations: Annotated[Any, _only([])] = None


class ChatRequest(_GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_LOGPROBS)] = None
    # Known and not supported yet.
    response_format: Annotated[Any, _only({"type": "text"})] = None
    tools: Annotated[Any, _only([])] = None
    tool_choice: Annotated[Any, _only("none", "auto")] = None

    @property
    def num_logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs: true", param="top_logprobs", code="invalid_value")
        return None


_Request = TypeVar("_Request", bound=_GenerationRequest)


def _decode(body: bytearray) -> dict[str, Any]:
    """A body's JSON object."""
    if not body.strip():
        raise ApiError(400, "the body is empty; expected a JSON object")
    try:
        value = json.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: byte {error.start}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deep") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {type(value).__name__}; expected an object")
    return value


def _validate(schema: type[_Request], value: dict[str, Any]) -> _Request:
    known = schema.model_fields.keys()
    if len(value) > len(known) + _MAX_UNKNOWN_FIELDS:
        dropped = set([name for name in value if name not in known][_MAX_UNKNOWN_FIELDS:])
        value = {name: field for name, field in value.items() if name not in dropped}
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise _first_error(error) from None


def _first_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(map(str, first["loc"]))[:_MAX_SHOWN_CHARS] or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param}: unknown field", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{param}: is required", param=param, code="missing_required_parameter")
    found = first["input"]
    shown = f", got {str(found)[:40]}" if isinstance(found, int | float) else ""
    return ApiError(400, f"{param or 'body'}: {first['msg']}{shown}", param=param, code="invalid_value")


# --- the application --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the interface needs to know of the model, and whom it serves (see `Gate`)."""

    model_name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    request_timeout_s: float = REQUEST_TIMEOUT_S
    hosts: Hosts | None = None
    api_key: ApiKey | None = None


class Api:
    """The handlers of all routes."""

    def __init__(self, client: RowClient, tokenizer: Tokenizer, config: ServerConfig) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._config = config
        self._geometry = client.segment.geometry
        self._readiness = client.readiness
        # Daemons know those that the model's files name; the tokenizer's class may have one of its own.
        end_id = tokenizer.end_token_id
        is_new = end_id is not None and end_id not in config.eos_token_ids and end_id < config.vocab_size
        self._further_end_ids = (end_id,) if end_id is not None and is_new else ()
        self._metrics = Metrics(client)
        client.on_first_token = self._metrics.observe_first_token
        self._started = int(time.time())
        self.held = HeldBytes(MAX_HELD_BYTES)
        self._prompts = PromptReader(
            tokenizer, vocab_size=config.vocab_size, max_context=client.segment.geometry.max_context
        )
        self._prompts.warm_up()
        # Of bodies up to _SHORT_BODY_BYTES, and of larger ones.
        self.readers = tuple(Reader(self._read_packed, timeout_s=READ_TIMEOUT_S) for _ in range(2))
        self._document = document(
            config.model_name,
            {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest},
            max_body_bytes=MAX_BODY_BYTES,
            needs_key=config.api_key is not None,
        )

    async def completions(self, http: Request) -> Response:
        return await self._handle(http, CompletionRequest, "cmpl")

    async def chat_completions(self, http: Request) -> Response:
        return await self._handle(http, ChatRequest, "chatcmpl")

    async def models(self, http: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, http: Request) -> Response:
        self._check_model(http.path_params["model"])
        return json_response(self._model_card())

    async def health(self, http: Request) -> Response:
        """Liveness: once loaded it stays 200 while the supervisor can bring back what dies."""
        if self._client.is_closing or self._client.segment.is_closed():
            return json_response({"status": "stopping"}, 503)
        if self._readiness.is_loading():
            return json_response({"status": "loading", "missing": self._readiness.missing()}, 503)
        if not self._readiness.supervisor_lives():
            return json_response({"status": "no supervisor"}, 503)
        return json_response({"status": "ok"})

    async def ready(self, http: Request) -> Response:
        """Readiness: a request sent now would be worked on."""
        missing = self._readiness.missing()
        if missing or self._client.is_closing:
            return json_response({"status": "not ready", "missing": missing}, 503)
        return json_response({"status": "ready"})

    async def openapi(self, http: Request) -> Response:
        return json_response(self._document)

    def close(self) -> None:
        """End the processes that read for us."""
        for reader in self.readers:
            reader.close()

    async def metrics(self, http: Request) -> Response:
        """What Prometheus scrapes."""
        return Response(self._metrics.text(), media_type=Metrics.content_type)

    def _model_card(self) -> dict[str, object]:
        return {
            "id": self._config.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "pdctl",
            "max_model_len": self._geometry.max_context,
            "vocab_size": self._config.vocab_size,
            "default_sampling_params": asdict(self._config.sampling),
        }

    # --- generation ----------------------------------------------------------------------------------------

    async def _handle(self, http: Request, schema: type[_GenerationRequest], prefix: str) -> Response:
        received_ns = time.monotonic_ns()
        given = http.headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"{prefix}-{secrets.token_hex(16)}"
        http.state.request_id = request_id
        held, answer = Held(self.held), None
        try:
            body = await read_body(http, held)
            answer = await until_disconnect(http.receive, self._answer(schema, body, held, request_id, received_ns))
        except ApiError as error:
            log.info("%s %s %d %s", request_id, http.url.path, error.status, error.code or "refused")
            raise
        except ClientDisconnect:
            pass
        finally:
            if not isinstance(answer, EventStream):  # which has only begun
                held.release()
        if answer is None:
            log.info("%s %s client left", request_id, http.url.path)
            return Response(status_code=499)  # nobody reads it
        return answer

    async def _answer(
        self, schema: type[_GenerationRequest], body: bytearray, held: Held, request_id: str, received_ns: int
    ) -> Response:
        request, prompts = await self._read(schema, body)
        body.clear()  # our caller has it, too, to the end of the answer
        self._check_model(request.model)
        if request.stream_options is not None and not request.stream:
            raise ApiError(400, "stream_options: only with stream: true", param="stream_options")
        if self._readiness.is_loading():
            raise self._turned_away(ApiError(503, "the model is loading", code="loading", retry_after_s=1))
        if self._readiness.absent():
            raise self._turned_away(no_daemon_error(self._readiness, self._readiness.absence_words()))
        if isinstance(prompts, ApiError):
            raise prompts
        held.set(sum(len(prompt) * prompt.itemsize for prompt in prompts))
        plan = self._plan(request, prompts, request_id, received_ns)
        answer = Answer(plan, self._client, self._tokenizer, self._metrics.observe, held)
        await answer.begin()
        if request.stream:
            return EventStream(answer)
        try:
            parts = await answer.collect()
        finally:
            answer.close()
        answer.log_line(200)
        return WholeAnswer(parts, {"X-Request-Id": request_id})

    def _turned_away(self, error: ApiError) -> ApiError:
        self._client.segment.words[H.REJECTED] += 1
        return error

    # --- reading ---------------------------------------------------------------------------------------------

    async def _read(self, schema: type[_GenerationRequest], body: bytearray) -> tuple[_GenerationRequest, _Prompts]:
        """A request and its prompts: here if that is quick, else in a process that may take its time."""
        if len(body) <= INLINE_BODY_BYTES:
            request = _validate(schema, _decode(body))
            if _num_prompts(request) <= _INLINE_PROMPTS:
                return request, self._read_prompts(request)
        reader = self.readers[len(body) > _SHORT_BODY_BYTES]
        try:
            packed = await reader.run(bytes((_SCHEMAS.index(schema),)), body)
        except TimeoutError:
            raise ApiError(504, f"not read and tokenized within {READ_TIMEOUT_S:g} s", code="timeout") from None
        except ReaderMemoryError:
            raise ApiError(413, "reading the request would take too much memory", code="body_too_large") from None
        except ReaderError as error:
            log.error("reading a request: %s", error)
            raise ApiError(500, "internal error", code="internal_error") from None
        request, prompts = _unpack(schema, packed)
        await asyncio.sleep(0)  # of a large one that was some milliseconds, and so is what follows
        return request, prompts

    def _read_prompts(self, request: _GenerationRequest) -> _Prompts:
        """What is wrong with them is told later: other refusals come first."""
        try:
            if isinstance(request, ChatRequest):
                return self._prompts.read_chat(_template_messages(request.messages))
            return self._prompts.read_prompts(request.prompt if isinstance(request, CompletionRequest) else ())
        except ApiError as error:
            return error

    def _read_packed(self, job: bytearray) -> bytes:
        """The reader's work: the schema's number and a body, to what `_unpack` takes."""
        schema = _SCHEMAS[job[0]]
        try:
            value = _decode(job[1:])
            request = _validate(schema, value)
        except ApiError as error:
            return _pack({"error": error.values()})
        prompts = self._read_prompts(request)
        kept = {name: field for name, field in value.items() if name not in _LEFT_OUT}
        if isinstance(request.model, str):
            kept["model"] = request.model[: len(self._config.model_name) + _MAX_SHOWN_CHARS]
        if isinstance(prompts, ApiError):
            return _pack({"request": kept, "refused": prompts.values()})
        return _pack({"request": kept, "lengths": list(map(len, prompts))}, prompts)

    # --- planning --------------------------------------------------------------------------------------------

    def _check_model(self, name: str | None) -> None:
        served = self._config.model_name
        if name is not None and name != served:
            raise ApiError(
                404,
                f"model {name[:_MAX_SHOWN_CHARS]!r} is not served here: {served!r} is",
                param="model",
                code="model_not_found",
            )

    def _plan(self, request: _GenerationRequest, prompts: Sequence[Ids], request_id: str, received_ns: int) -> Plan:
        params = self._row_params(request)
        num_choices = request.num_choices
        if (num_rows := len(prompts) * num_choices) > MAX_PROMPTS:
            message = f"n {num_choices}: {len(prompts)} prompts make {num_rows} answers, at most {MAX_PROMPTS}"
            raise ApiError(400, message, param="n", code="invalid_value")
        deadline_ns = received_ns + int(self._config.request_timeout_s * 1e9)
        rows: list[RowRequest] = []
        for prompt in prompts:
            limit = self._limit_tokens(request, len(prompt))
            for number in range(num_choices):
                # Every answer draws from a stream of its own; the first from that of n = 1.
                seed = secrets.randbits(63) if request.seed is None else request.seed + number
                rows.append(
                    RowRequest(
                        request_id=request_id if num_rows == 1 else f"{request_id}-{len(rows)}",
                        tokens=prompt,
                        limit_tokens=limit,
                        params=replace(params, seed=seed & _SEED_MASK),
                        deadline_ns=deadline_ns,
                        received_ns=received_ns,
                    )
                )
        options = request.stream_options
        return Plan(
            request_id=request_id,
            created=int(time.time()),
            model=self._config.model_name,
            chat=isinstance(request, ChatRequest),
            rows=tuple(rows),
            num_choices=num_choices,
            hidden_ids=frozenset(params.stop_ids + (() if request.ignore_eos else self._config.eos_token_ids)),
            stops=request.stop,
            deadline_ns=deadline_ns,
            include_usage=options is not None and bool(options.include_usage),
            return_token_ids=bool(request.return_token_ids),
            wants_logprobs=params.num_logprobs is not None,
            timings=bool(request.timings),
        )

    def _row_params(self, request: _GenerationRequest) -> RowParams:
        """All but the seed, which every row has for itself."""
        stop_ids = tuple(request.stop_token_ids or ())
        for name, ids in (
            ("stop_token_ids", stop_ids),
            ("logit_bias", [token for token, _ in request.logit_bias]),
        ):
            for token in ids:
                if not 0 <= token < self._config.vocab_size:
                    raise outside_vocabulary(name, token, self._config.vocab_size)
        if not request.ignore_eos:
            stop_ids += self._further_end_ids
        defaults = self._config.sampling
        temperature = defaults.temperature if request.temperature is None else request.temperature
        top_k = defaults.top_k if request.top_k is None else request.top_k
        return RowParams(
            temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
            top_p=defaults.top_p if request.top_p is None else request.top_p,
            top_k=0 if top_k == -1 else min(top_k, self._config.vocab_size),
            min_p=defaults.min_p if request.min_p is None else request.min_p,
            min_tokens=request.min_tokens or 0,
            repetition_penalty=(
                defaults.repetition_penalty if request.repetition_penalty is None else request.repetition_penalty
            ),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            ignore_eos=bool(request.ignore_eos),
            stop_ids=stop_ids,
            logit_bias=request.logit_bias,
            num_logprobs=request.num_logprobs,
        )

    def _limit_tokens(self, request: _GenerationRequest, num_prompt: int) -> int:
        """Prompt and output together, at most; what a default asks for shrinks to what there is."""
        g = self._geometry
        capacity = g.num_blocks * g.block_tokens
        asked, param = request.output_limit
        prompt_param = "messages" if isinstance(request, ChatRequest) else "prompt"
        room = max(1, min(g.max_context, capacity) - num_prompt)
        default = room if isinstance(request, ChatRequest) else min(room, DEFAULT_COMPLETION_TOKENS)
        if self._config.sampling.max_tokens is not None:
            default = min(default, self._config.sampling.max_tokens)
        wanted = default if asked is None else asked
        limit = num_prompt + wanted
        if limit > g.max_context:
            raise ApiError(
                400,
                f"this model's context is {g.max_context} tokens, but {limit} were asked for: "
                f"{num_prompt} in the {prompt_param} and {wanted} in {param}",
                param=prompt_param if num_prompt >= g.max_context else param,
                code="context_length_exceeded",
            )
        if limit > capacity:
            raise ApiError(
                400,
                f"{limit} tokens ({num_prompt} in the {prompt_param}, {wanted} in {param}) need "
                f"{-(-limit // g.block_tokens)} blocks of {g.block_tokens}; the pool has {g.num_blocks}",
                param=prompt_param if num_prompt >= capacity else param,
                code="capacity_exceeded",
            )
        if (request.min_tokens or 0) > wanted:
            raise ApiError(
                400,
                f"min_tokens {request.min_tokens}: more than the {wanted} of {param}",
                param="min_tokens",
                code="invalid_value",
            )
        return limit


def _template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Messages as chat templates expect them: text, never null."""
    found = []
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            param = f"messages.{index}.content"
            raise ApiError(400, f"{param}: is required", param=param, code="invalid_value")
        one = {"role": message.role, "content": message.content or ""}
        if message.name is not None:
            one["name"] = message.name
        found.append(one)
    return found


_Prompts: TypeAlias = "list[Ids] | ApiError"
_SCHEMAS: list[type[_GenerationRequest]] = [CompletionRequest, ChatRequest]
# What a request may have much of, and the router has no use for once it is read; and what stands in for it.
_LEFT_OUT = frozenset({"prompt", "messages", "user", "metadata"})
_STAND_INS = ({"prompt": "-"}, {"messages": [{"role": "user", "content": "-"}]})


def _num_prompts(request: _GenerationRequest) -> int:
    return len(request.messages if isinstance(request, ChatRequest) else getattr(request, "prompt", ()))


def _pack(head: dict[str, object], prompts: Sequence[Ids] = ()) -> bytes:
    text = encode(head).encode()
    return b"".join((len(text).to_bytes(8, "little"), text, *(ids.tobytes() for ids in prompts)))


def _unpack(schema: type[_GenerationRequest], packed: memoryview) -> tuple[_GenerationRequest, _Prompts]:
    at = 8 + int.from_bytes(packed[:8], "little")
    head = json.loads(bytes(packed[8:at]))
    if "error" in head:
        raise ApiError(**head["error"])
    request = _validate(schema, head["request"] | _STAND_INS[_SCHEMAS.index(schema)])
    if "refused" in head:
        return request, ApiError(**head["refused"])
    prompts = []
    for length in head["lengths"]:
        prompts.append(ids := array("I"))
        ids.frombytes(packed[at : (at := at + length * ids.itemsize)])
    return request, prompts


def create_app(client: RowClient, tokenizer: Tokenizer, config: ServerConfig) -> FastAPI:
    """The ASGI application over one segment.

    Its `state` has `close`, which ends the processes that it has started, the `readers` of these, and `held`, the
    memory of requests.
    """
    api = Api(client, tokenizer, config)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    for path, handler, method in (
        ("/v1/completions", api.completions, "POST"),
        ("/v1/chat/completions", api.chat_completions, "POST"),
        ("/v1/models", api.models, "GET"),
        ("/v1/models/{model:path}", api.model, "GET"),
        ("/health", api.health, "GET"),
        ("/health/ready", api.ready, "GET"),
        ("/metrics", api.metrics, "GET"),
        ("/openapi.json", api.openapi, "GET"),
    ):
        app.add_route(path, handler, methods=[method])

    def headers_of(http: Request) -> dict[str, str]:
        request_id = getattr(http.state, "request_id", None)
        return {} if request_id is None else {"X-Request-Id": request_id}

    async def on_api_error(http: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):
            raise error
        return json_response(error.body(), error.status, headers_of(http) | error.headers)

    async def on_http_error(http: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            raise error
        message = f"{http.method} {http.url.path}: {error.detail}"
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        return json_response(error_body(error.status_code, message, code=code), error.status_code, error.headers)

    async def on_bug(http: Request, error: Exception) -> Response:
        # The server logs the traceback; the client learns nothing of the inside.
        return json_response(error_body(500, "internal error", code="internal_error"), 500, headers_of(http))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)
    app.add_middleware(Gate, hosts=config.hosts, key=config.api_key)
    app.state.close, app.state.held, app.state.readers = api.close, api.held, api.readers
    return app
