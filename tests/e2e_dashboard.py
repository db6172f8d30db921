"""Over HTTP: health, metrics in Prometheus' form, the dashboard and its JSON, and who may read."""
import base64
import http.client
import json
import os
import re
import socket
import stat
import subprocess

from cluster import BIN, PATIENCE, Cluster, expect, tell, until

SAMPLE = re.compile(r'^([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+)\})? (\S+)$')
TOKEN = "a-token-of-twenty-characters"


def address(c):
    """Where the newest life of the coordinator listens."""
    def said():
        with open(os.path.join(c.folder, "coordinator.log")) as f:
            found = re.findall(r"address=http://(\S+) msg", f.read())
        return found[-1] if found else None
    return until(said, 10, "the coordinator says where it listens")


def ask(c, path, method="GET", body=None, **headers):
    connection = http.client.HTTPConnection(address(c), timeout=10 * PATIENCE)
    connection.request(method, path, body=body,
                       headers={k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers


def get(c, path, **headers):
    status, text, _ = ask(c, path, **headers)
    expect(status == 200, f"GET {path}: {status} {text}")
    return text


def value_of(c, path):
    return json.loads(get(c, "/api/v1/" + path))


def samples(text):
    """Every sample of an exposition by name and labels; fails on what Prometheus would refuse."""
    types, found, last = {}, {}, None
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            expect(name not in types, f"two families {name}")
            types[name], last = kind, name
        elif not line.startswith("# HELP "):
            m = SAMPLE.match(line)
            expect(m, f"not a sample: {line}")
            base = re.sub("_(bucket|sum|count)$", "", m[1]) if types[last] == "histogram" else m[1]
            expect(base == last, f"{line} stands in the family {last}")
            expect(types[last] != "counter" or base.endswith("_total"), f"a counter named {base}")
            key = (m[1], m[2] or "")
            expect(key not in found, f"twice: {line}")
            found[key] = float(m[3])
    return found


def metrics_tell(c, job):
    before = samples(get(c, "/metrics"))
    c.ok("ping")
    after = samples(get(c, "/metrics"))
    pings = ("ballast_requests_total", 'method="PING",code="OK"')
    expect(after[pings] == before[pings] + 1, f"pings: {before[pings]} and {after[pings]}")
    expect(after[("ballast_jobs_submitted_total", "")] == 1, "one job was submitted")
    expect(after[("ballast_jobs_ended_total", 'state="DONE"')] == 1, "it is done")
    expect(after[("ballast_jobs", 'state="RUNNING"')] == 0, "nothing runs")
    expect(after[("ballast_workers", 'state="IDLE"')] == 2, "two workers are idle")
    expect(after[("ballast_serving", "")] == 1, "it serves")
    for name in ("turn", "commit", "query", "job_queue", "job_run"):
        expect(after[(f"ballast_{name}_seconds_count", "")] > 0, f"no {name} was measured")
        expect(after[(f"ballast_{name}_seconds_bucket", 'le="+Inf"')]
               == after[(f"ballast_{name}_seconds_count", "")], f"buckets of {name}")
    for name, least in (("process_resident_memory_bytes", 1e6), ("process_open_fds", 5),
                        ("ballast_records_total", 5), ("ballast_disk_free_bytes", 1)):
        expect(after[(name, "")] >= least, f"{name}: {after[(name, '')]}")
    workers = samples(get(c, "/metrics/workers"))
    expect(workers[("ballast_worker_up", 'worker="w0",node="here"')] == 1, f"{workers}")
    expect(samples(get(c, "/metrics/jobs")) == {}, "ended jobs have no series")


def what_is_deployed_exists(c):
    """Rules and the board ask for metrics that there are."""
    families = set()
    for path in ("/metrics", "/metrics/jobs", "/metrics/workers"):
        families |= set(re.findall("# TYPE (\\S+)", get(c, path)))
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "deploy", "monitoring")
    for name in ("alerts.yml", "grafana.json"):
        with open(os.path.join(folder, name)) as f:
            used = set(re.findall("ballast_[a-z_]+", f.read()))
        unknown = {u for u in used if re.sub("_bucket$", "", u) not in families}
        expect(len(used) > 5 and not unknown, f"{name} asks for {unknown}")
    with open(os.path.join(folder, "grafana.json")) as f:
        expect(len(json.load(f)["panels"]) > 10, "the board has panels")
    with open(os.path.join(folder, "..", "..", "docs", "monitoring.md")) as f:
        told = f.read()
    unsaid = {n for n in families if n.startswith("ballast_") and n not in told and
              not n.startswith(("ballast_job_", "ballast_gpu_"))}
    expect(not unsaid, f"docs/monitoring.md does not tell {unsaid}")


def json_is_the_clients(c, job):
    shown = c.json("job", "show", job)
    expect(shown.pop("seconds_left") is None, "an ended job has nothing left; the client asks twice")
    expect(value_of(c, f"jobs/{job}") | {"meta": 0} == shown | {"meta": 0},
           "a job is told in two ways")
    expect(value_of(c, "jobs")["items"] == c.json("jobs", "-a")["items"], "jobs")
    expect(value_of(c, "jobs?all=0")["items"] == [], "no job lives")
    events = c.events(job)
    expect(value_of(c, f"jobs/{job}/events")["items"] == events, "events")
    for n in (len(events) - 1, len(events)):
        part = value_of(c, f"jobs/{job}/events?count={n}")
        expect(part["items"] == events[-n:] and part["meta"]["truncated"] == (n < len(events)),
               f"the newest {n} of {len(events)} events")
    steps = c.steps(job)
    expect(value_of(c, f"jobs/{job}/steps")["items"] == steps, "steps")
    expect(value_of(c, f"jobs/{job}/steps?after=5")["items"] == steps[5:], "steps after the fifth")
    cut = value_of(c, f"jobs/{job}/steps?count=3")
    expect(cut["items"] == steps[-3:] and cut["meta"]["truncated"], "the last steps")
    whole = value_of(c, f"jobs/{job}/steps?count={len(steps)}")
    expect(whole["items"] == steps and not whole["meta"]["truncated"], "all steps")
    until(lambda: value_of(c, f"jobs/{job}/experts")["items"] == c.json("experts", job)["items"],
          5, "the same load of experts (the last minute goes on between two questions)")
    until(lambda: value_of(c, f"jobs/{job}/load-history?window=all")["windows"] ==
          c.json("experts", job, "--history", "--window", "all")["windows"], 5,
          "the same windows of load (they are joined as time goes on)")
    expect(value_of(c, f"jobs/{job}/rebalances")["items"] ==
           c.json("rebalance", "history", job)["items"], "rebalances")
    names = {w["name"]: w["pid"] for w in value_of(c, "workers")["items"]}
    expect(names == {n: w["pid"] for n, w in c.workers().items()}, f"workers: {names}")
    expect(value_of(c, "cluster")["workers"]["IDLE"] == 2, "cluster")


def pages_are_there(c):
    expect(address(c) in c.ok("doctor") and c.json("ping")["dashboard"] == address(c),
           "the client tells where the dashboard is")
    for path, kind in (("/", "text/html"), ("/dashboard.js", "text/javascript"),
                       ("/dashboard.css", "text/css")):
        status, text, headers = ask(c, path)
        expect(status == 200 and headers["Content-Type"].startswith(kind) and len(text) > 500,
               f"{path}: {status} {headers}")
        expect("default-src 'self'" in headers["Content-Security-Policy"], f"{headers}")
    page = get(c, "/")
    ids = set(re.findall(r'id="([a-z-]+)"', page))
    wanted = set(re.findall(r'\$\("([a-z-]+)"\)|"(chart-[a-z]+)"', get(c, "/dashboard.js")))
    missing = {a or b for a, b in wanted} - ids
    expect(not missing, f"the page lacks {missing}")
    expect("http:" not in page and "https:" not in page, "the page loads from elsewhere")
    status, text, _ = ask(c, "/", "HEAD")
    expect(status == 200 and not text, f"HEAD: {status} {text}")


def what_is_wrong_is_refused(c, job):
    for path, status, word in (
            ("/nothing", 404, "/metrics"), ("/../etc/passwd", 404, "/metrics"),
            ("/api/v1/nothing", 404, "cluster"), ("/api/v1/jobs/x", 404, "cluster"),
            (f"/api/v1/jobs/{job}/x", 404, "cluster"), ("/api/v1/jobs/999", 404, "999"),
            ("/api/v1/jobs/99999999999999999999", 404, "cluster"),
            ("/api/v1/jobs/999/steps", 404, "999"), ("/api/v1/jobs?count=0", 400, "count"),
            ("/api/v1/jobs?count=-1", 400, "count"), ("/api/v1/jobs?count=1e3", 400, "count"),
            ("/api/v1/jobs?count=100000000000000000000", 400, "count"),
            ("/api/v1/jobs?count=", 400, "count"), ("/api/v1/jobs?all=2", 400, "all"),
            (f"/api/v1/jobs/{job}/steps?after=", 400, "after"),
            (f"/api/v1/jobs/{job}/experts?window=1d", 400, "window"),
            (f"/api/v1/jobs/{job}/load-history?window=", 400, "window")):
        got, text, _ = ask(c, path)
        expect(got == status, f"{path}: {got} instead of {status}: {text}")
        expect(word in text, f"{path}: '{text}' does not say {word}")
    try:
        status, _, _ = ask(c, "/" + "x" * 40000)
    except (OSError, http.client.HTTPException):
        status = 414  # it was hung up on while it still asked
    expect(status in (414, 431), f"a request without end: {status}")
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        status, text, headers = ask(c, "/api/v1/jobs", method, body="x" * 100000)
        expect(status == 405 and headers["Allow"] == "GET, HEAD", f"{method}: {status} {text}")
    status, text, _ = ask(c, "/metrics", Host="pages.example")
    expect(status == 403 and "localhost" in text, f"a foreign name: {status} {text}")
    for host in ("localhost", "localhost:1", "127.0.0.1", "[::1]:80"):
        get(c, "/metrics", Host=host)
    get(c, "/livez", Host="pages.example")


def nobody_stops_it(c):
    """Silent, slow and many connections take nothing from others."""
    host, port = address(c).split(":")
    crowd = [socket.create_connection((host, int(port))) for _ in range(60)]
    for s in crowd[:20]:
        s.send(b"GET /metrics HTT")
    c.ok("ping")
    for s in crowd:
        s.close()
    until(lambda: "ok" in get_quietly(c, "/livez"), 10, "the crowd is forgotten")
    s = socket.create_connection((host, int(port)))
    s.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)))
    s.close()
    c.ok("ping")


def get_quietly(c, path):
    try:
        return ask(c, path)[1]
    except OSError:
        return ""


def a_token_is_needed(c, token_file):
    c.kill("coordinator")
    c.coordinator_keys = f'http: {{listen: "0.0.0.0:0", token: {token_file}}}\n'
    c.start_coordinator()
    for path in ("/livez", "/readyz"):
        expect("ok" in get(c, path), path)
    basic = "Basic " + base64.b64encode(f"any:{TOKEN}".encode()).decode()
    for path in ("/metrics", "/", "/api/v1/jobs"):
        status, _, headers = ask(c, path)
        expect(status == 401 and "Basic" in headers["WWW-Authenticate"], f"{path}: {status}")
        for wrong in ("Bearer", "Bearer x", f"Bearer {TOKEN}x", "Basic eDp5", "Basic ?"):
            expect(ask(c, path, Authorization=wrong)[0] == 401, f"{path} with {wrong}")
        for right in (f"Bearer {TOKEN}", f"bearer {TOKEN}", basic):
            get(c, path, Authorization=right, Host="any.example")


def bad_configurations_are_told(c, token_file):
    def check(text, word):
        path = os.path.join(c.folder, "bad.yaml")
        with open(path, "w") as f:
            f.write(f"listen: ['{c.address}']\nstate_dir: {c.folder}/state\n{text}\n")
        done = subprocess.run([os.path.join(BIN, "ballast-coordinator"), "--config", path,
                               "--check-config"], capture_output=True, text=True)
        expect(done.returncode == 2 and word in done.stderr and done.stderr.count("\n") == 1,
               f"{text}: {done.returncode} {done.stderr}")
    check("http: {listen: '0.0.0.0:9477'}", "http.token")
    check("http: {listen: '9477'}", "IP:PORT")
    check("http: {listen: 'localhost:9477'}", "IP:PORT")
    check("http: {listen: '127.0.0.1:99999'}", "IP:PORT")
    check(f"http: {{token: {token_file}}}", "http.listen")
    check("http: {listen: '0.0.0.0:9477', token: /nowhere}", "/nowhere")
    os.chmod(token_file, 0o644)
    check(f"http: {{listen: '0.0.0.0:9477', token: {token_file}}}", "chmod 600")
    os.chmod(token_file, stat.S_IRUSR | stat.S_IWUSR)
    short = os.path.join(c.folder, "short")
    with open(os.open(short, os.O_CREAT | os.O_WRONLY, 0o600), "w") as f:
        f.write("short\n")
    check(f"http: {{listen: '0.0.0.0:9477', token: {short}}}", "16 to 255")


def story():
    """the dashboard and the metrics say what is so, to those who may know"""
    c = Cluster(n_workers=2)
    c.coordinator_keys = 'http: {listen: "127.0.0.1:0"}\n'
    with c:
        job = c.submit(c.job(steps=12, workers=2, fsdp=2, ep=2,
                             more="rebalance: {window_steps: 4}"))
        until(lambda: samples(get(c, "/metrics/jobs")).get(
            ("ballast_job_steps", f'job="{job}",name="tiny",user="{c.show(job)["user"]}"')) == 12
            or c.show(job)["state"] == "DONE", 30, "a living job has series")
        c.wait(job, "DONE")
        until(lambda: c.n_idle() == 2, 10, "the workers are idle again")
        metrics_tell(c, job)
        what_is_deployed_exists(c)
        json_is_the_clients(c, job)
        pages_are_there(c)
        what_is_wrong_is_refused(c, job)
        nobody_stops_it(c)
        token_file = os.path.join(c.folder, "token")
        with open(os.open(token_file, os.O_CREAT | os.O_WRONLY, 0o600), "w") as f:
            f.write(TOKEN + "\n")
        a_token_is_needed(c, token_file)
        bad_configurations_are_told(c, token_file)


tell(story)
