"""vLLM's values and ours: `Sampling` to ``SamplingParams``, outputs to `Answer`, and its metrics as a dict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bandmaster import UsageError
from bandmaster.rl.engines.answers import Answer
from bandmaster.rl.engines.sampling import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams

DEFAULT_VERSION = "default"  # vLLM's label of weights before the first sync, and of versions that are no numbers


def sampling_params(sampling: Sampling, is_text: bool) -> SamplingParams:
    """The parameters for vLLM that mean the same as a `Sampling`.

    Args:
        sampling: How to choose tokens.
        is_text: Whether answers are to have a text.

    Raises:
        UsageError: ``sampling.extra`` has what vLLM does not know, or refuses.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError

    values: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "seed": sampling.seed,
        "n": sampling.n,
        "logprobs": sampling.logprobs,
        "flat_logprobs": True,
        "detokenize": is_text,
    }
    unknown = [name for name in sampling.extra if name in values or name not in SamplingParams.__struct_fields__]
    if unknown:
        raise UsageError(
            f"extra of Sampling has {unknown[0]!r}, which is a field of Sampling itself, or unknown to vLLM's "
            "SamplingParams"
        )
    try:
        return SamplingParams(**values, **sampling.extra)
    except (TypeError, ValueError, VLLMClientError) as error:
        raise UsageError(f"vLLM refuses the sampling: {error}") from error


def answers_of(output: Any, sampling: Sampling, version: int, is_text: bool) -> list[Answer]:
    """The answers, or parts of them, of an output of vLLM.

    Args:
        output: A ``vllm.RequestOutput``, with ``flat_logprobs``.
        sampling: How the tokens were chosen.
        version: The version of the weights, for tokens of which vLLM does not say it, as those of parts are.
        is_text: Whether the answers have a text.
    """
    return [_answer(one, sampling, version, is_text) for one in output.outputs]


def _answer(one: Any, sampling: Sampling, version: int, is_text: bool) -> Answer:
    tokens = list(one.token_ids)
    log_probs: list[float] | None = None
    top: list[dict[int, float]] | None = None
    if sampling.logprobs is not None:
        flat = one.logprobs
        if tokens and flat is not None:
            log_probs = [flat.logprobs[start] for start in flat.start_indices]  # that of the chosen token comes first
            if sampling.logprobs:
                places = zip(flat.start_indices, flat.end_indices, strict=True)
                top = [dict(zip(flat.token_ids[a:b], flat.logprobs[a:b], strict=True)) for a, b in places]
        else:
            log_probs, top = [], [] if sampling.logprobs else None
    text = one.text if is_text else None
    return Answer(tokens, log_probs, _versions(one, len(tokens), version), one.finish_reason, text, one.index, top)


def _versions(one: Any, n_tokens: int, version: int) -> list[int]:
    """The version of the weights that made each of the last tokens of an answer."""
    spans = one.weight_versions
    if spans is None:  # it is not the last output
        return [version] * n_tokens
    versions = [_number(span.version) for span in spans for _ in range(span.start, span.end)]
    return versions[len(versions) - n_tokens :]


def _number(label: str) -> int:
    return 0 if label == DEFAULT_VERSION else int(label)


def metrics_of() -> dict[str, float]:
    """The counters and gauges of vLLM in this process by their names; those with several labels are added up."""
    from vllm.v1.metrics.reader import Counter, Gauge, get_metrics_snapshot

    found: dict[str, float] = {}
    for metric in get_metrics_snapshot():
        if isinstance(metric, Counter | Gauge):
            found[metric.name] = found.get(metric.name, 0) + metric.value
    return found
