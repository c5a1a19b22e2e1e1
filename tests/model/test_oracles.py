# SPDX-License-Identifier: Apache-2.0
"""The model against recorded transformers outputs: logits, hidden states, experts, states, greedy tokens, MTP."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen_spmd import checkpoint, model

NAMES = ["qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"]
LENGTHS = [1, 3, 4, 5, 63, 64, 65, 130, 257]
TOLERANCE = 1e-3


@functools.cache
def load(folder, cfg, dtype=jnp.float32):
    return checkpoint.load(folder, cfg, dtype=dtype, progress=False)


@pytest.fixture(params=NAMES)
def loaded(request, oracle):
    folder, cfg, data = oracle(request.param)
    return load(folder, cfg), cfg, data


def feed(run, tokens, chunk):
    """(hidden, logits, trace) of the whole prompt, fed in chunks."""
    seq = run.sequence(tokens)
    outs = [run.step([(seq, n)], T=chunk + 3) for n in pieces(len(tokens), chunk)]
    hidden, logits, trace = zip(*(o[0] for o in outs), strict=True)
    join = lambda *xs: np.concatenate(xs, 1)  # noqa: E731
    return seq, np.concatenate(hidden), np.concatenate(logits), jax.tree.map(join, *trace)


def pieces(n, chunk):
    return [min(chunk, n - i) for i in range(0, n, chunk)]


def channels(cfg):
    """Disk order of the convolution's channels (all q, all k, all v) from ours (by key head)."""
    g = cfg.gated_delta
    by_key_head = np.arange(g.channels).reshape(g.key_heads, -1)
    parts = np.split(by_key_head, [g.key_dim, 2 * g.key_dim], axis=1)
    return np.concatenate([part.reshape(-1) for part in parts])


@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_matches_at_every_position(loaded, runner, length):
    params, cfg, data = loaded
    p = f"p{length}"
    run = runner(params, cfg)
    seq, hidden, logits, trace = feed(run, data[f"{p}/input_ids"], 257)
    np.testing.assert_allclose(logits, data[f"{p}/logits"], atol=TOLERANCE)
    rows = data[f"{p}/rows"]
    np.testing.assert_allclose(hidden[rows], data[f"{p}/final_hidden"], atol=TOLERANCE)
    np.testing.assert_allclose(trace.hidden[:, rows], data[f"{p}/hidden"][1:], atol=TOLERANCE)
    if trace.routing is not None:
        check_routing(trace.routing, data, p, rows)
    if cfg.gated_delta is not None:
        state = np.asarray(run.state.rec[:, seq.slot])
        np.testing.assert_allclose(state, data[f"{p}/gdn_state"], atol=TOLERANCE)
        conv = np.asarray(run.state.conv[:, seq.slot])[..., channels(cfg)].swapaxes(1, 2)
        np.testing.assert_allclose(conv, data[f"{p}/conv_state"], atol=TOLERANCE)


def check_routing(routing, data, p, rows):
    np.testing.assert_allclose(routing.logits_TE[:, rows], data[f"{p}/router_logits"], atol=TOLERANCE)
    np.testing.assert_allclose(
        np.sort(routing.gates_TX[:, rows], -1), np.sort(data[f"{p}/router_weights"], -1), atol=TOLERANCE
    )
    # Ids are compared where the last chosen and the first not chosen are further apart than rounding.
    ordered = np.sort(data[f"{p}/router_logits"], -1)
    X = routing.experts_TX.shape[-1]
    clear = ordered[..., -X] - ordered[..., -X - 1] > 2e-3
    assert clear.mean() > 0.9
    ours, theirs = np.sort(routing.experts_TX[:, rows], -1), np.sort(data[f"{p}/router_ids"], -1)
    np.testing.assert_array_equal(ours[clear], theirs[clear])


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_match_the_whole(loaded, runner, chunk):
    params, cfg, data = loaded
    tokens = data["p130/input_ids"]
    _, _, logits, _ = feed(runner(params, cfg), tokens, chunk)
    np.testing.assert_allclose(logits, data["p130/logits"], atol=TOLERANCE)


def test_one_token_steps_match_the_whole(loaded, runner):
    """Decode steps (one row a sequence) of a sequence whose neighbours are empty."""
    params, cfg, data = loaded
    run = runner(params, cfg)
    seq = run.sequence(data["p65/input_ids"])
    logits = [run.step([(seq, 1)], B=2, one_token=True)[0][1] for _ in seq.tokens]
    np.testing.assert_allclose(np.concatenate(logits), data["p65/logits"], atol=TOLERANCE)


@pytest.mark.parametrize("length", [5, 65, 257])
def test_greedy_tokens(loaded, runner, length):
    params, cfg, data = loaded
    p = f"p{length}"
    run = runner(params, cfg)
    seq = run.sequence(data[f"{p}/input_ids"])
    step, new = run.step([(seq, length)], T=260), []
    for _ in range(32):
        new.append(int(step[0][1][-1].argmax()))
        seq.tokens.append(new[-1])
        step = run.step([(seq, 1)], B=2, one_token=True)
    assert new == list(data[f"{p}/greedy_ids"])


def test_ragged_batch_equals_each_alone(loaded, runner):
    """Prompts of different lengths prefilled and decoded in one batch, in steps that mix both."""
    params, cfg, data = loaded
    run = runner(params, cfg)
    lens = data["ragged/lens"]
    seqs = [run.sequence(ids[:n]) for ids, n in zip(data["ragged/ids"], lens, strict=True)]
    new = [[] for _ in seqs]
    for _ in range(60):
        parts = [(s, 1) for s in seqs if s.done == len(s.tokens) - 1 and s.done > 0]
        parts += [(s, min(50, len(s.tokens) - s.done)) for s in seqs if (s, 1) not in parts and s.done < len(s.tokens)]
        if not parts:
            break
        for (s, _), (_, logits, _) in zip(parts, run.step(parts, T=256, B=6), strict=True):
            i = seqs.index(s)
            if s.done == len(s.tokens) and len(new[i]) < 16:
                if not new[i]:
                    np.testing.assert_allclose(logits[-1], data["ragged/last_logits"][i], atol=TOLERANCE)
                new[i].append(int(logits[-1].argmax()))
                s.tokens += new[i][-1:] if len(new[i]) < 16 else []
    np.testing.assert_array_equal(np.array(new), data["ragged/greedy_ids"])


@pytest.mark.parametrize("length", [65, 257])
def test_sequences_match(loaded, length):
    """The training forward, right padded to whole chunks."""
    params, cfg, data = loaded
    tokens = np.zeros((2, 320), np.int32)
    tokens[1, :length] = data[f"p{length}/input_ids"]
    hidden, trace = jax.jit(lambda p, t: model.forward_sequences(p, t, cfg))(params, tokens)
    logits = model.unembed(params, hidden)[1, :length]
    np.testing.assert_allclose(logits, data[f"p{length}/logits"], atol=TOLERANCE)
    rows = data[f"p{length}/rows"]
    np.testing.assert_allclose(trace.hidden[:, 1, rows], data[f"p{length}/hidden"][1:], atol=TOLERANCE)


@pytest.mark.parametrize("length", [5, 65])
def test_mtp_logits(loaded, length):
    params, cfg, data = loaded
    if not cfg.mtp:
        pytest.skip("Qwen3 has no MTP layer")
    tokens, following = np.zeros((1, 320), np.int32), np.zeros((1, 320), np.int32)
    tokens[0, :length] = data[f"p{length}/input_ids"]
    following[0, :length] = data[f"p{length}/mtp_input_ids"]

    @jax.jit
    def run(params, tokens, following):
        hidden, _ = model.forward_sequences(params, tokens, cfg)
        mtp, _ = model.mtp_sequences(params, hidden, following, cfg)
        return mtp, model.unembed(params, mtp)

    mtp, logits = run(params, tokens, following)
    np.testing.assert_allclose(mtp[0, :length], data[f"p{length}/mtp_hidden"], atol=TOLERANCE)
    np.testing.assert_allclose(logits[0, :length], data[f"p{length}/mtp_logits"], atol=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_as_close_as_transformers(oracle, runner, name):
    """bfloat16 on tiny random models is far from float32: judged by mean KL and agreement, beside transformers' own."""
    folder, cfg, data = oracle(name)
    peer = json.loads((folder / "oracle_meta.json").read_text())["bfloat16_eager"]
    run = runner(load(folder, cfg, jnp.bfloat16), cfg, dtype=jnp.bfloat16)
    tokens = data[f"{peer['prompt']}/input_ids"]
    _, _, logits, _ = feed(run, tokens, 257)
    want = jax.nn.log_softmax(jnp.asarray(data[f"{peer['prompt']}/logits"], jnp.float32))
    kl = float(jnp.mean(jnp.sum(jnp.exp(want) * (want - jax.nn.log_softmax(logits)), -1)))
    agree = float(np.mean(logits.argmax(-1) == np.asarray(want).argmax(-1)))
    assert kl < 1.5 * peer["mean_kl"] + 1e-3
    assert agree > peer["argmax_agreement"] - 0.05


def test_packed_sequences_equal_each_alone(loaded):
    """Several sequences in a row, the next beginning anywhere in a chunk."""
    params, cfg, data = loaded
    tokens, offset, rows = np.zeros((1, 320), np.int32), np.arange(320, dtype=np.int32)[None], []
    start = 0
    for length in (5, 130, 1, 65, 3, 63):
        tokens[0, start : start + length] = data[f"p{length}/input_ids"]
        offset[0, start:] = np.arange(320 - start)
        rows.append((length, slice(start, start + length)))
        start += length
    hidden, _ = jax.jit(lambda p, t, o: model.forward_sequences(p, t, cfg, offset_BT=o))(params, tokens, offset)
    logits = np.asarray(model.unembed(params, hidden))[0]
    for length, row in rows:
        np.testing.assert_allclose(logits[row], data[f"p{length}/logits"], atol=TOLERANCE)
