"""The pair on a GPU: the package's kernels, grouped experts, captured rounds, and bit-equal greedy texts."""

import pytest
import torch
from dspark_pairs import make_pair, random_prompts

from mhc.dspark import DSparkDraft, Target, V4Config, generate, initialise, to_inference
from mhc.dspark.expansion import EXPANSIONS
from mhc.dspark.ffn import Experts
from mhc.dspark.matmul import matmul_fp32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def mini():
    config = V4Config.mini()
    target = initialise(Target(config).cuda(), config, 0)
    draft = initialise(DSparkDraft(config).cuda().bind(target), config, 1)
    with torch.no_grad():
        for model in (target, draft):
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(3)
    return to_inference(target), to_inference(draft)


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(64, low=20, high=200, vocab_size=2048)


@torch.no_grad()
def test_products_keep_fp32():
    generator = torch.Generator(device="cuda").manual_seed(0)
    a = torch.randn(3, 40, 64, generator=generator, device="cuda").bfloat16()
    b = torch.randn(3, 64, 50, generator=generator, device="cuda").bfloat16()
    want = a.double() @ b.double()
    assert (matmul_fp32(a, b).double() - want).abs().max() < 1e-4
    assert (matmul_fp32(a[0], b[0]).double() - want[0]).abs().max() < 1e-4


@torch.no_grad()
def test_grouped_experts_equal_one_by_one():
    config = V4Config.tiny("moe")
    experts = initialise(Experts(config), config, 0).cuda().bfloat16()
    x = torch.randn(50, 64, device="cuda").bfloat16()
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(50)]).cuda()  # expert 3 stays idle
    weights = torch.rand(50, 2, device="cuda")
    grouped = experts(x, weights, chosen)
    order = chosen.flatten().argsort(stable=True)
    loop = experts._one_by_one(x[order // 2], chosen)
    want = torch.empty_like(loop).index_copy(0, order, loop).view(50, 2, -1).float()
    want = (want * weights.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(grouped.float(), want, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("expansion", sorted(EXPANSIONS))
def test_greedy_texts_are_bit_equal_to_plain_at_the_same_shapes(mini, prompts, expansion):
    target, draft = mini
    plain = generate(target, prompts, 64, width=8)
    drafted = generate(target, prompts, 64, draft=draft, expansion=expansion)
    different = sum(a.tokens != b.tokens for a, b in zip(plain, drafted, strict=True))
    assert different == 0, f"{different} of {len(prompts)} texts differ"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafted", [False, True])
def test_captured_rounds_equal_eager_ones(mini, prompts, temperature, drafted):
    target, draft = mini
    settings = {"draft": draft if drafted else None, "temperature": temperature, "trace": drafted}
    assert generate(target, prompts, 48, capture=True, **settings) == generate(target, prompts, 48, **settings)


@pytest.mark.parametrize("ffn", ["dense", "moe"])
def test_gpu_and_cpu_agree(ffn):
    """bf16 on both sides: most texts, since a near-tie may fall either way."""
    cpu = make_pair(ffn, dtype=torch.bfloat16)
    prompts = random_prompts(16)
    want = [item.tokens for item in generate(cpu[0], prompts, 12, draft=cpu[1])]
    target, draft = cpu[0].cuda(), cpu[1].cuda()
    draft.bind(target)
    got = [item.tokens for item in generate(target, prompts, 12, draft=draft)]
    assert sum(a == b for a, b in zip(want, got, strict=True)) >= 12


@pytest.mark.parametrize("expansion", ["broadcast", "table"])
def test_refresh_is_seen_by_a_captured_draft(mini, expansion):
    """A refit writes into the same storage, so that a graph captured before it computes with the new weight."""
    _, draft = mini
    context = draft.context(4, 32)
    block = draft.block(torch.tensor([5, 6, 7, 8], device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda"))
    with torch.no_grad():
        for _ in range(3):
            draft(*block, context, expansion=expansion)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = draft(*block, context, expansion=expansion).logits
        graph.replay()
        before, state = captured.clone(), {name: tensor.clone() for name, tensor in draft.state_dict().items()}
        changed = {name: tensor * 1.5 if name.endswith("hc_attn_fn") else tensor for name, tensor in state.items()}
        draft.load_state_dict(changed)
        graph.replay()
        assert not torch.equal(captured, before)
        torch.testing.assert_close(captured, draft(*block, context, expansion=expansion).logits)
        draft.load_state_dict(state)
