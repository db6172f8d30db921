"""One job of each model family trains from random weights, saves, and resumes from that."""
import json
import os

from cluster import Cluster, expect, tell

DEEPSEEK = {
    "model_type": "deepseek_v3", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1, "intermediate_size": 64, "num_attention_heads": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32,
                     "mscale": 1.0, "mscale_all_dim": 1.0},
}
INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
LINEAR = {
    "model_type": "kimi_linear", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 4,
    "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "mla_use_nope": True, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1,
    "moe_intermediate_size": 16, "moe_renormalize": True, "routed_scaling_factor": 2.446,
    "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 16,
                           "num_heads": 2, "short_conv_kernel_size": 4},
}


def models(kimi):
    with_indexer = json.loads(json.dumps(kimi))
    with_indexer["text_config"]["dsa_config"] = dict(INDEXER, layers=[4])
    return {"kimi-linear": LINEAR, "deepseek-v3": DEEPSEEK,
            "deepseek-v32": dict(DEEPSEEK, model_type="deepseek_v32", **INDEXER),
            "kimi-k31": with_indexer}


def write_model(c, name, config):
    os.makedirs(os.path.join(c.folder, name))
    with open(os.path.join(c.folder, name, "config.json"), "w") as f:
        json.dump(config, f)


def a_family_trains_and_resumes(c, name, config):
    write_model(c, name, config)
    with_groups = config.get("n_group", 1) > 1
    rule = "sign" if with_groups else "quantile"
    path = c.job(name=name, steps=20, checkpoint_every=10)
    common = ["--set", f"model.path={name}", "--set", f"moe.bias_update={rule}", "--wait"]
    if with_groups:
        bad = c.run("submit", path, "--set", f"model.path={name}")
        expect(bad.returncode not in (0, 1) and "moe.bias_update" in bad.stderr, bad.stderr)
    done = c.run("submit", path, *common, timeout=80)
    expect(done.returncode == 0, f"{name}: --wait ended with {done.returncode}: {done.stderr}")
    number = max(int(j["id"]) for j in c.json("jobs", "-a")["items"])
    steps = c.steps(number)
    expect(len(steps) == 20, f"{name}: {len(steps)} steps are stored")
    expect(steps[-1]["loss"] < steps[0]["loss"] - 0.3, f"{name}: nothing learnt: {steps[-1]}")
    done = c.run("submit", path, *common, "--set", "train.steps=25", timeout=80)
    expect(done.returncode == 0, f"{name}: resumed, ended with {done.returncode}: {done.stderr}")
    expect(len(c.steps(number + 1, first=21)) == 5, f"{name}: did not go on from step 20")


def an_indexer_learns(c, name, stage):
    """From the model that was trained; only its indexers change."""
    path = c.job(name=f"{name}-{stage}", steps=20, checkpoint_every=10)
    done = c.run("submit", path, "--set", f"model.path={name}", "--set", "train.mode=indexer",
                 "--set", f"train.indexer.stage={stage}", "--set", "moe.bias_update=off", "--wait",
                 timeout=80)
    expect(done.returncode == 0, f"{name}: --wait ended with {done.returncode}: {done.stderr}")
    steps = c.steps(max(int(j["id"]) for j in c.json("jobs", "-a")["items"]))
    expect(len(steps) == 20, f"{name} {stage}: {len(steps)} steps are stored")
    expect(steps[-1]["loss"] < steps[0]["loss"], f"{name} {stage}: nothing learnt: {steps}")


def story():
    """every family trains, saves and resumes"""
    from cluster import TINY_MODEL
    with Cluster(n_workers=4) as c:
        for name, config in models(TINY_MODEL).items():
            a_family_trains_and_resumes(c, name, config)
        an_indexer_learns(c, "deepseek-v32", "dense")
        an_indexer_learns(c, "kimi-k31", "sparse")
        refused = c.run("submit", c.job(name="none"), "--set", "train.mode=indexer")
        expect("train.mode" in refused.stderr, refused.stderr)


tell(story)
