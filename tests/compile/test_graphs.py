"""Which graphs a deployment compiles, and why."""

from __future__ import annotations

from dataclasses import replace

from vlmgen.compile.graphs import Deployment, deployment_of
from vlmgen.serve.settings import ServeSettings

DEPLOYMENT = Deployment(4096, 32, (128, 256, 4096), (1, 2, 8), (512, 1024, 2048), 512)


def test_graphs_come_in_the_order_of_warm_up() -> None:
    names = [graph.name for graph in DEPLOYMENT.graphs()]
    assert names == [
        "vision-512", "vision-1024", "vision-2048",
        "prefill-128", "prefill-256", "prefill-4096",
        "decode-1", "decode-2", "decode-8",
    ]  # fmt: skip


def test_every_graph_says_what_ends_up_in_it() -> None:
    why = {graph.name: DEPLOYMENT.why(graph) for graph in DEPLOYMENT.graphs()}
    assert why["vision-512"] == "pictures and frames that pack into 1 block of 512 patches"
    assert why["vision-2048"] == "pictures and frames that pack into 3 to 4 blocks of 512 patches"
    assert why["prefill-128"] == "prompts of 1 to 128 tokens, padded to 128"
    assert why["prefill-4096"] == "prompts of 257 to 4096 tokens, padded to 4096"
    assert why["decode-1"] == "steps of 1 request"
    assert why["decode-2"] == "steps of 2 requests"
    assert why["decode-8"] == "steps of 3 to 8 requests, padded to 8"


def test_a_deployment_comes_back_from_the_settings_that_it_gives() -> None:
    served = {
        "neuron_config": {"on_device_sampling_config": None},
        "vision_neuron_config": {"encoder_cache_num_blocks": 17},
        "other": 1,
    }
    for deployment in (replace(DEPLOYMENT, cache_blocks=9), replace(DEPLOYMENT, cache_blocks=17)):
        config = deployment.additional_config(served)
        assert config["other"] == 1
        assert config["neuron_config"]["on_device_sampling_config"] is None
        settings = ServeSettings(deployment.max_model_len, 8, config, {})
        assert deployment_of(settings) == deployment
    least = DEPLOYMENT.additional_config(served)  # without a number of blocks: as it is served
    assert least["vision_neuron_config"]["encoder_cache_num_blocks"] == 17
