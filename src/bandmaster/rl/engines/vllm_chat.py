"""Chat templates, tool calls and reasoning of models, as vLLM's own server has them. Imported in workers alone.

`OnlineRenderer` applies the chat template and the tokenizer, `Parser` finds tool calls and reasoning in answers, and
constrains the sampling where a tool or a schema is required; both take vLLM's `ChatCompletionRequest`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMClientError
from vllm.parser import ParserManager
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tool_parsers import ToolParserManager

from bandmaster import UsageError
from bandmaster.rl.engines.answers import Answer
from bandmaster.rl.engines.completions import Conversation, Message, Prompt, PromptTooLong, Reader, Rendering
from bandmaster.rl.engines.sampling import Sampling


class ChatFormat:
    """The renderer, the parser and the end tokens of a model, which all conversations share.

    Args:
        config: The ``VllmConfig`` of the engine.
        renderer: The engine's ``BaseRenderer``.
        tool_parser: The name of a parser of tool calls; None for a model that makes none.
        reasoning_parser: The name of a parser of reasoning; None for a model that shows none.
        chat_template: A chat template instead of the tokenizer's.

    Raises:
        UsageError: There is no such parser, or it does not fit the tokenizer.
    """

    def __init__(
        self,
        config: Any,
        renderer: Any,
        tool_parser: str | None,
        reasoning_parser: str | None,
        chat_template: str | None,
    ) -> None:
        model = config.model_config
        self.tokenizer, self.model_config, self.has_tools = renderer.get_tokenizer(), model, tool_parser is not None
        try:
            self.parser = ParserManager.get_parser(
                tool_parser_name=tool_parser,
                reasoning_parser_name=reasoning_parser,
                enable_auto_tools=self.has_tools,
                model_name=model.model,
                is_harmony=model.hf_config.model_type == "gpt_oss",
                tokenizer=self.tokenizer,
            )
        except TypeError as error:
            raise UsageError(
                f"tool_parser={tool_parser!r} and reasoning_parser={reasoning_parser!r} cannot be used: {error}; vLLM "
                f"has the tool parsers {', '.join(ToolParserManager.list_registered())}"
            ) from error
        self.renderer = OnlineRenderer(
            model,
            renderer,
            request_logger=None,
            chat_template=chat_template,
            chat_template_content_format="auto",
            enable_auto_tools=self.has_tools,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
        )
        self.ends = frozenset(_ends(model, self.tokenizer))

    def conversation(self, prompt: Prompt) -> VLLMConversation:
        """A conversation for one request.

        Raises:
            UsageError: It has tools, for which there is no parser.
        """
        if prompt.tools and prompt.options.get("tool_choice") != "none" and not self.has_tools:
            raise UsageError(
                "tools need a parser for the model's tool calls: rl.VLLM(..., tool_parser=...), one of "
                f"{', '.join(ToolParserManager.list_registered())}"
            )
        return VLLMConversation(self, prompt)


def _ends(model: Any, tokenizer: Any) -> set[int]:
    found = model.try_get_generation_config().get("eos_token_id")
    ends = {found} if isinstance(found, int) else set(found or ())
    return ends if tokenizer.eos_token_id is None else {*ends, tokenizer.eos_token_id}


class VLLMConversation(Conversation):
    """One conversation.

    Args:
        form: The renderer, the parser and the end tokens.
        prompt: The prompt.
    """

    def __init__(self, form: ChatFormat, prompt: Prompt) -> None:
        self._form, self._prompt, self.ends = form, prompt, form.ends
        self._request: Any = None  # as the parser has adjusted it

    async def render(self, messages: Sequence[Message], is_open: bool) -> Rendering:
        """Render messages by vLLM's renderer.

        Raises:
            UsageError: vLLM or the template refuses the messages.
            PromptTooLong: They are more than the context.
        """
        fields = dict(self._prompt.options)
        if self._prompt.tools:
            fields["tools"] = list(self._prompt.tools)
        try:
            request = ChatCompletionRequest(messages=list(messages), add_generation_prompt=is_open, **fields)
            rendered = await self._form.renderer.render_chat(request)
        except ValidationError as error:
            raise UsageError(f"the messages or tools are not valid: {_first(error)}") from error
        except VLLMClientError as error:
            kind = PromptTooLong if "maximum context length" in str(error) else UsageError
            raise kind(f"vLLM refuses the messages: {error}") from error
        except Exception as error:  # templates are programs, and raise what they like
            raise UsageError(f"the model's chat template refuses the messages: {error}") from error
        if isinstance(rendered, ErrorResponse):
            raise UsageError(f"vLLM refuses the messages: {rendered.error.message}")
        _, (made,) = rendered
        if is_open and self._request is None:
            self._request = request
        return Rendering(list(made["prompt_token_ids"]), made.get("prompt"))

    def encode(self, text: str, is_first: bool) -> list[int]:
        """The token ids of a text by the model's tokenizer."""
        return list(self._form.tokenizer.encode(text, add_special_tokens=is_first))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids by the model's tokenizer."""
        return str(self._form.tokenizer.decode(list(ids)))

    def adjusted(self, sampling: Sampling) -> Sampling:
        """The sampling, with the constraints that a required tool or a response format makes."""
        request = self._request
        if request is None:  # a text
            return sampling
        extra = dict(sampling.extra)
        constraints = request.extract_structured_outputs()
        if constraints is not None:
            extra["structured_outputs"] = constraints
        if not request.skip_special_tokens:
            extra["skip_special_tokens"] = False
        if extra == sampling.extra and not request.stop_token_ids:
            return sampling
        return replace(
            sampling, extra=extra, stop_token_ids=[*sampling.stop_token_ids, *(request.stop_token_ids or ())]
        )

    def reader(self, ids: Sequence[int]) -> Reader:
        """A reader by the model's parser, if it has one."""
        form, request = self._form, self._request
        if form.parser is None or request is None:
            return Reader()
        kwargs = dict(self._prompt.options.get("chat_template_kwargs") or {})
        parser = form.parser(form.tokenizer, request.tools, chat_template_kwargs=kwargs, model_config=form.model_config)
        parser.set_prompt_token_ids(ids)
        return ParserReader(parser, request, list(ids), form.has_tools)


class ParserReader(Reader):
    """Reads one answer by a vLLM parser.

    Args:
        parser: The parser, which has read nothing.
        request: The request.
        ids: The ids of the prompt.
        has_tools: Whether the model makes tool calls.
    """

    def __init__(self, parser: Any, request: Any, ids: list[int], has_tools: bool) -> None:
        self._parser, self._request, self._ids, self._has_tools = parser, request, ids, has_tools

    def delta(self, part: Answer) -> Mapping[str, Any] | None:
        """The addition of a part of an answer to the message."""
        made = self._parser.parse_delta(
            delta_text=part.text or "",
            delta_token_ids=part.tokens,
            request=self._request,
            prompt_token_ids=self._ids,
            finished=part.finish_reason is not None,
        )
        found: dict[str, Any] = {} if made is None else made.model_dump(exclude_none=True)
        return {name: value for name, value in found.items() if name != "role" and value not in ("", [])} or None

    def message(self, answer: Answer) -> Mapping[str, Any]:
        """The message of a whole answer."""
        reasoning, content, calls = self._parser.parse(
            answer.text or "", self._request, enable_auto_tools=self._has_tools, model_output_token_ids=answer.tokens
        )
        made: dict[str, Any] = {"content": content if calls else content or ""}
        if reasoning:
            made["reasoning"] = reasoning
        if calls:
            made["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return made


def _first(error: ValidationError) -> str:
    """The first of the mistakes that pydantic found."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
