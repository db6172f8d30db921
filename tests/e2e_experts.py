"""Expert load of a running job: counted, reported, stored, asked for; a copy of the database."""
import json
import os
import sqlite3

from cluster import Cluster, expect, tell, until


def devices(c, job):
    """Per layer and device its experts."""
    return [[sorted(e for e in device if e >= 0) for device in layer["placement"]]
            for layer in c.json("placement", job)["layers"]]


def give(c, job):
    """A placement from a file is carried out, whatever the planner would do."""
    c.ok("rebalance", "auto", "off", job)
    path = os.path.join(c.folder, "placement.csv")
    c.ok("placement", job, "--placement-out", path)
    with open(path) as f:
        head, *rows = [line.split(",") for line in f.read().splitlines()]
    device = head.index("device")
    with open(path, "w") as f:  # device 0's experts to 1, 1's to 2, ...
        for row in [head] + rows:
            if row is not head:
                row[device] = str((int(row[device]) + 1) % c.n_workers)
            f.write(",".join(row) + "\n")
    before = devices(c, job)
    wrong = c.run("rebalance", "apply", job, "--placement", os.path.join(c.folder, "none.csv"))
    expect(wrong.returncode == 2 and "none.csv" in wrong.stderr, f"no such file: {wrong.stderr}")
    until(lambda: c.run("rebalance", "apply", job, "--placement", path).returncode == 0, 40,
          "the placement is taken once a load under the one in force is known")
    until(lambda: devices(c, job) == [layer[-1:] + layer[:-1] for layer in before], 40,
          "every device has what the one before it had")
    last = c.json("rebalance", "history", job)["items"][-1]
    expect(last["state"] == "DONE" and not last["automatic"], f"a person's: {last}")
    expect(last["moves"] >= len(before), f"moves in every layer: {last}")


def look(c):
    job = c.submit(c.job(steps=4000))
    c.wait_step(job, 25)
    until(lambda: c.run("experts", job).returncode == 0, 40, "a load report is stored")

    experts = c.json("experts", job, "--window", "all")["items"]
    expect(len(experts) > 0, "a layer with experts")
    for layer in experts:
        expect(sum(layer["tokens"]) > 0, f"layer {layer['layer']} has tokens")
        expect(layer["imbalance"]["experts"] >= 1, "max over mean of experts")
        expect(layer["imbalance"]["devices"] >= 1, "max over mean of devices")
    first = experts[0]
    per_step = sum(first["tokens"]) / first["window_steps"]
    expect(per_step == int(per_step) and all(
        sum(e["tokens"]) == per_step * e["window_steps"] for e in experts),
        "every layer serves the same tokens each step")

    history = c.json("experts", job, "--history")
    expect(history["windows"], "there is a window of the past")
    for window in history["windows"]:
        expect([x["layer"] for x in window["imbalance"]] == [x["layer"] for x in experts],
               "a history has the same layers")
        expect(all(x[of] > 1 - 1e-9 for x in window["imbalance"] for of in ("experts", "devices")),
               "max over mean of experts and devices")
        expect(abs(sum(window["device_load"]) - len(window["device_load"])) < 1e-6,
               "loads of devices are over their mean")
    expect(history["router"]["bias_update"] == "quantile", "the router's part is told")
    expect(" placement changed" in c.ok("experts", job, "--history", "--plot"), "it is drawn")

    rows = c.json("db", "query", f"""
        SELECT layer, count(DISTINCT expert) AS n, sum(tokens) * 1.0 / (SELECT sum(n_steps) FROM
        load_windows WHERE job = {job}) AS per_step FROM expert_load WHERE job = {job}
        GROUP BY layer""")["items"]
    expect(len(rows) == len(experts), "SQL sees the same layers")
    for row, layer in zip(rows, experts):
        expect(row["n"] == len(layer["tokens"]), "one row per expert")
        expect(row["per_step"] == per_step, "SQL sees the same tokens")
    expect(c.run("db", "query", "DELETE FROM jobs").returncode == 2, "SQL only reads")

    placement = c.json("placement", job)
    expect(len(placement["layers"]) == len(experts), "every sparse layer is placed")
    for layer in placement["layers"]:
        slots = [e for device in layer["placement"] for e in device if e >= 0]
        expect(sorted(set(slots)) == list(range(len(first["tokens"]))), "every expert has a slot")
    until(lambda: c.run("rebalance", "plan", job).returncode in (0, 10), 40,
          "a plan, or none, once the placement in force has been for a window")
    expect("auto" in c.run("rebalance", "history", job).stderr, "history says if it is automatic")
    expect(f"{job} tiny" in c.ok("top", "--once"), "top shows the job")
    give(c, job)

    copy = os.path.join(c.folder, "copy.db")
    c.ok("db", "backup", copy)
    denied = c.run("db", "backup", copy + "2", "--address", c.tcp)
    expect(denied.returncode == 4 and not os.path.exists(copy + "2"),
           f"nobody knows who comes over tcp: {denied.stderr}")
    with sqlite3.connect(f"file:{copy}?mode=ro", uri=True) as db:
        expect(db.execute("PRAGMA integrity_check").fetchone() == ("ok",), "the copy is whole")
        expect(str(db.execute("SELECT max(id) FROM jobs").fetchone()[0]) == job, "it has the job")
    expect(json.loads(c.ok("job", "cancel", job, "--json"))["id"] == job, "it is cancelled")


def story():
    """expert load is counted, stored and asked for; a copy of the database is whole"""
    with Cluster(n_workers=4) as c:
        look(c)


tell(story)
