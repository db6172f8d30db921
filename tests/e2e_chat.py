"""Chats become tasks by deploy/chat-tokens, of which a job learns the assistant's words alone."""
import json
import os
import subprocess
import sys

from cluster import Cluster, expect, tell

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "deploy", "chat-tokens")

# A tokenizer of bytes with a template, in place of the package that reads the model's own.
TRANSFORMERS = '''
class AutoTokenizer:
    @staticmethod
    def from_pretrained(path, trust_remote_code):
        if not trust_remote_code:
            raise ValueError("set the option `trust_remote_code=True` to\\nremove this error")
        return AutoTokenizer()

    def apply_chat_template(self, messages, tokenize, tools=None, add_generation_prompt=False):
        text = "".join(f"<{m['role']}>{m['content']}</>" for m in messages)
        if any(m["role"] == "assistant" and "(thinks)" in m["content"] for m in messages[:-1]):
            text = text.replace("(thinks)", "")
        return text + ("<assistant>" if add_generation_prompt else "")

    def __call__(self, text, add_special_tokens):
        return {"input_ids": list(text.encode())}
'''


def said(role, content):
    return {"role": role, "content": content}


def run(c, *args):
    return subprocess.run([sys.executable, SCRIPT, *args], capture_output=True, text=True,
                          env=dict(os.environ, PYTHONPATH=os.path.join(c.folder, "python")))


def tokenize(c, *chats):
    path = os.path.join(c.folder, "chats.jsonl")
    with open(path, "w") as f:
        f.writelines(json.dumps({"messages": chat}) + "\n" for chat in chats)
    return run(c, "--trust-remote-code", c.folder, path)


def refused(c, *args):
    done = run(c, *args)
    expect(done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done)
    return done.stderr


def story():
    """Questions have no labels; what cannot be cut is refused by its line; a job takes the rest"""
    with Cluster(n_workers=1) as c:
        os.mkdir(os.path.join(c.folder, "python"))
        with open(os.path.join(c.folder, "python", "transformers.py"), "w") as f:
            f.write(TRANSFORMERS)
        two = [said("system", "Be brief."), said("user", "one"), said("assistant", "eins"),
               said("user", "two"), said("assistant", "zwei"), said("user", "not answered")]
        done = tokenize(c, two)
        expect(done.returncode == 0 and "1 chats" in done.stderr, done.stderr)
        task = json.loads(done.stdout)
        text = bytes(task["input_ids"]).decode()
        expect(text == "<system>Be brief.</><user>one</><assistant>eins</><user>two</>"
               "<assistant>zwei</>", text)
        learned = bytes(x if x >= 0 else ord(" ") for x in task["labels"]).decode()
        expect(learned.split() == ["eins</>", "zwei</>"], learned)
        expect(all(x in (y, -100) for x, y in zip(task["labels"], task["input_ids"])), task)
        for chat, says in (([said("user", "x")], "no message of an assistant"),
                           ([said("user", "x"), said("assistant", "(thinks) y"),
                             said("user", "z"), said("assistant", "q")], "drop their thoughts")):
            done = tokenize(c, two, chat)
            expect(done.returncode == 1 and "chats.jsonl:2: " in done.stderr
                   and says in done.stderr, done.stderr)
        path = os.path.join(c.folder, "chats.jsonl")
        expect("--trust-remote-code runs it" in refused(c, c.folder, path), "code is not trusted")
        expect("expected the model's" in refused(c, c.folder + "/no", path), "no model")
        expect("expected lines of chats" in refused(c, c.folder, path + "l"), "no chats")
        done = tokenize(c, *[two] * 50)
        with open(os.path.join(c.folder, "text", "chats.jsonl"), "w") as f:
            f.write(done.stdout)
        job = c.submit(c.job(steps=4, workers=1, fsdp=1, ep=1), "--set",
                       "data.train=[text/chats.jsonl]", "--set", "data.format=jsonl",
                       "--set", "data.validation=[]")
        c.wait(job, "DONE")
        expect(f"{50 * len(task['input_ids'])} tokens in 50 documents" in c.run("logs", job).stdout,
               c.run("logs", job).stdout)


tell(story)
