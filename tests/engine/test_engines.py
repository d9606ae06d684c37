"""The contract of the engines. Two ranks try all engines of a family, and the tests look at the
answers.
"""

import gc

import engine_checks as checks
import pytest
import torch
from engine_checks import ENGINES, OPTIMIZERS, TRAININGS, is_exact
from raising import raises
from ranks import on_ranks
from torch import nn

from distap.stages.replica import Replica
from distap.training.loss_scale import FIRST_SCALE
from distap.world import World


def of(engines):
    """Parameters of a test; DeepSpeed's ranks start slowly."""
    return [
        name if is_exact(name) else pytest.param(name, marks=pytest.mark.slow) for name in engines
    ]


ALL = of(ENGINES)


def alone(exact):
    """An engine of a lone process, after one step."""
    network, groups = checks.network_and_groups(exact)
    engine = ENGINES["ddp"].build(network, lambda: checks.ADAM.build(groups()), World())
    checks.three_stages(World(), engine)
    return engine


@pytest.fixture(scope="module")
def saved():
    return {exact: checks.whole(alone(exact)) for exact in (True, False)}


@pytest.fixture(scope="module")
def families(tmp_path_factory, saved):
    """What came of a family of engines on each rank; a family is started when it is first asked
    for.
    """
    answer = {}

    def answers(exact):
        if exact not in answer:
            names = [name for name in ENGINES if is_exact(name) == exact]
            answer[exact] = on_ranks(
                checks.RANKS, checks.everything, names, tmp_path_factory.mktemp("ranks"), saved
            )
        return answer[exact]

    return answers


@pytest.fixture
def on_two_ranks(families):
    def answers(check, name):
        if not is_exact(name):
            pytest.importorskip("deepspeed")
        return [answer[check, name] for answer in families(is_exact(name))]

    return answers


@pytest.mark.parametrize("clip_norm", [None, 1e-3])
@pytest.mark.parametrize("name", of(ENGINES))
def test_parameters_move_along_the_sum_over_ranks_of_what_backward_was_given(
    on_two_ranks, name, clip_norm
):
    network, groups = checks.network_and_groups(is_exact(name))
    before = {key: tensor.detach().clone() for key, tensor in network.named_parameters()}
    for rank in range(checks.RANKS):
        checks.replay(World(rank=rank, size=checks.RANKS), Replica(network, World()))
    norm = float(nn.utils.clip_grad_norm_(network.parameters(), clip_norm or float("inf")))
    optimizer = checks.PLAIN.build(groups())
    for group in optimizer.param_groups:
        group["lr"] = group.get("factor", 1.0)
    optimizer.step()
    exactness = {"rtol": 1e-9, "atol": 1e-12} if is_exact(name) else {"rtol": 1e-4, "atol": 1e-6}
    assert norm > 1e-2
    for moved, same_norm in (answer[clip_norm] for answer in on_two_ranks("moved", name)):
        assert same_norm == pytest.approx(norm, rel=1e-9 if is_exact(name) else 1e-5)
        for key, parameter in network.named_parameters():
            expected = (before[key] - parameter).detach()
            torch.testing.assert_close(moved[f"network.{key}"], expected, **exactness)


@pytest.mark.parametrize("case", of(TRAININGS))
def test_steps_with_dropout_uneven_shares_and_clipping_are_those_of_the_full_batch(
    on_two_ranks, case
):
    expected, norms, _ = checks.full_batch(is_exact(case), clip_norm=0.05)
    assert min(norms) > 0.05
    exactness = {"rtol": 1e-9, "atol": 1e-10} if is_exact(case) else {"rtol": 1e-4, "atol": 1e-5}
    for parameters, same_norms, _ in on_two_ranks("trained", case):
        assert same_norms == pytest.approx(norms, rel=exactness["rtol"])
        assert parameters.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(parameters[key], tensor, **exactness)


@pytest.mark.parametrize("case", of(case for case in TRAININGS if case != "zero 3"))
def test_the_average_is_that_of_a_plain_loop_and_describes_in_the_place_of_the_parameters(
    on_two_ranks, case
):
    *_, expected = checks.full_batch(is_exact(case), clip_norm=0.05)
    exactness = {"rtol": 1e-9, "atol": 1e-10} if is_exact(case) else {"rtol": 1e-4, "atol": 1e-5}
    for *_, (average, apart, is_unchanged) in on_two_ranks("trained", case):
        assert average.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(average[key], tensor, **exactness)
        assert apart < (1e-12 if is_exact(case) else 1e-6)
        # by being exchanged with the parameters, and by going to another engine
        assert is_unchanged


@pytest.mark.parametrize(
    ("name", "gathers", "reductions"),
    [
        *(("ddp", 0, 1), ("fsdp", 1, 1)),
        *(
            pytest.param(f"zero {stage}", stage // 3, 1, marks=pytest.mark.slow)
            for stage in (1, 2, 3)
        ),
    ],
)
def test_ranks_gather_parameters_and_reduce_gradients_once_a_step(
    on_two_ranks, name, gathers, reductions
):
    assert on_two_ranks("messages", name) == [(gathers, reductions)] * 2  # of 5 micro-batches


@pytest.mark.parametrize("name", ALL)
def test_a_step_that_was_given_up_or_failed_on_one_rank_leaves_nothing_behind(on_two_ranks, name):
    for first, *remaining in on_two_ranks("without damage", name):
        assert remaining == pytest.approx(
            [first] * len(remaining), rel=1e-9 if is_exact(name) else 1e-6
        )
        assert len(remaining) == (2 if name in checks.NEVER_BEGIN_AGAIN else 3)


@pytest.mark.parametrize("name", ALL)
def test_a_gradient_that_is_not_finite_on_one_rank_moves_nothing_on_any(on_two_ranks, name):
    first, second = on_two_ranks("bf16", name)
    for norms, has_moved, _ in (first, second):
        assert has_moved == [True, False, True]
        assert not norms[1] < float("inf")
        assert norms[0] > 1e-3 and norms[2] > 1e-3  # before clipping
    assert (first[0][0], first[0][2]) == (second[0][0], second[0][2])


@pytest.mark.parametrize("name", [name for name in ENGINES if is_exact(name)])
def test_an_overflow_on_one_rank_halves_the_loss_scale_on_all(on_two_ranks, name):
    wide = [norms for norms, _, _ in on_two_ranks("bf16", name)]
    for (norms, has_moved, scales), expected in zip(on_two_ranks("fp16", name), wide, strict=True):
        assert has_moved == [True, False, True]
        assert scales == [FIRST_SCALE, FIRST_SCALE / 2, FIRST_SCALE / 2]
        assert not norms[1] < float("inf")
        # the norm is that of the gradient without its scale
        assert [norms[0], norms[2]] == pytest.approx([expected[0], expected[2]], rel=0.02)


def test_deepspeed_refuses_float16_whose_scale_it_would_keep_otherwise():
    network, groups = checks.network_and_groups(exact=False)
    with raises("engine.wrong_precision", "fp16", "ddp", "fsdp"):
        ENGINES["zero 2"].build(
            network, lambda: checks.ADAM.build(groups()), World(), precision="fp16"
        )


@pytest.mark.parametrize("name", ALL)
def test_a_state_goes_from_one_rank_to_every_engine_and_back(on_two_ranks, saved, name):
    lone = alone(is_exact(name))
    for after, is_same in on_two_ranks("state", name):
        assert is_same
        expected = saved[is_exact(name)]
        assert {key: tensor.shape for key, tensor in after.items()} == {
            key: tensor.shape for key, tensor in expected.items()
        }
        assert float(after["optimizer.state.head.weight.step"]) == 2
        lone.load_state_dict(after)
        again = lone.state_dict()
        assert all(torch.equal(again[key], tensor) for key, tensor in after.items())


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        pytest.param(name, one, marks=() if is_exact(name) else pytest.mark.slow)
        for name in OPTIMIZERS
        for one in OPTIMIZERS[name]
    ],
)
def test_every_optimizer_moves_parameters_alike_and_goes_on_from_its_state(
    on_two_ranks, name, optimizer
):
    expected, _ = on_two_ranks(optimizer, "ddp" if is_exact(name) else name)[0]
    for state, restarted in on_two_ranks(optimizer, name):
        assert state.keys() == restarted.keys() == expected.keys()
        for key, tensor in state.items():
            assert torch.equal(restarted[key], tensor)
            torch.testing.assert_close(tensor, expected[key], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["lamb", "lars", "adafactor"])
def test_deepspeed_refuses_optimizers_that_need_whole_tensors(optimizer):
    with raises("engine.needs_whole_tensors"):
        checks.engine_of(World(), "zero 1", checks.TimmOptimizer(optimizer))


@pytest.mark.parametrize("name", ALL)
def test_ranks_describe_different_numbers_of_images_and_the_engine_can_be_collected(
    on_two_ranks, families, name
):
    for difference, norm, stays in on_two_ranks("apart", name):
        assert difference < (1e-12 if is_exact(name) else 1e-6)
        assert 0 < norm < float("inf")
        assert not stays  # or the process group could not end
    assert [answer["threads"] for answer in families(is_exact(name))] == [["MainThread"]] * 2


def test_fsdp_on_one_rank_shares_nothing_out():
    engine = checks.engine_of(World(), "fsdp")
    assert not engine.replica.lockstep and engine.replica.keeps_graphs
    assert checks.three_stages(World(), engine) == checks.three_stages(
        World(), checks.engine_of(World(), "ddp")
    )


@pytest.mark.slow
def test_deepspeed_needs_no_process_group_for_a_lone_process(caplog):
    pytest.importorskip("deepspeed")
    engine = checks.engine_of(World(), "zero 2")
    checks.three_stages(World(), engine)
    message = ('"gradient_clipping": 0.0', '"overlap_comm": false', '"contiguous_gradients": true')
    assert all(text in caplog.text for text in message)
    del engine
    gc.collect()
    assert not torch.distributed.is_initialized()
