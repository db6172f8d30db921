/* test_ctl_trace.c - traces of other systems: their loads, window by window, and every mistake */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/mem.h"
#include "coordinator/ctl_trace.h"
#include "tests/folder.h"

static char *path_of(const char *name)
{
    return xasprintf("%s/%s", folder, name);
}

static void write_bytes(const char *name, const void *bytes, size_t n)
{
    char *path = path_of(name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    fclose(f);
    free(path);
}

/* "window:layer: loads; ..." */
static char *say(const char *name, uint32_t window_steps)
{
    char *path = path_of(name), *text = NULL;
    struct loads l;
    struct err err;
    size_t n;
    FILE *out = open_memstream(&text, &n);
    if (trace_read(path, window_steps, &l, &err) < 0) {
        fprintf(out, "%s", err.text + (strstr(err.text, folder) == err.text ? strlen(folder) + 1
                                                                             : 0));
        fclose(out);
        free(path);
        return text;
    }
    for (uint32_t w = 0; w < l.n_windows; w++)
        for (uint32_t k = 0; k < l.n_layers; k++) {
            fprintf(out, "%s%ld:%u:", w + k ? "; " : "", (long)l.window[w], l.layer[k]);
            for (uint32_t e = 0; e < l.n_experts; e++)
                fprintf(out, " %g", loads_at(&l, w, k)[e]);
        }
    fclose(out);
    loads_fini(&l);
    free(path);
    return text;
}

static void expect(const char *what, const char *name, uint32_t window_steps, const char *text)
{
    char *got = say(name, window_steps);
    if (strcmp(got, text))
        fail_msg("%s: '%s' instead of '%s'", what, got, text);
    free(got);
}

static void lines_are_read(void **state)
{
    (void)state;
    static const struct {
        const char *what, *name, *lines;
        uint32_t    window_steps;
        const char *loads;
    } rows[] = {
        { "routes of two ranks add up", "router_trace_rank0.jsonl",
          "{\"rank\":0,\"step\":4,\"layer\":1,\"num_tokens\":2,\"topk\":2,"
          "\"top_indices\":[[0,2],[2,3]]}\n"
          "{\"rank\":1,\"step\":4,\"layer\":1,\"num_tokens\":1,\"topk\":2,"
          "\"top_indices\":[[2,-1]]}\n"
          "{\"rank\":0,\"step\":5,\"layer\":1,\"num_tokens\":1,\"topk\":1,\"top_indices\":[[1]]}\n",
          0, "4:1: 1 0 3 1; 5:1: 0 1 0 0" },
        { "steps join to windows", "r.jsonl",
          "{\"rank\":0,\"step\":4,\"layer\":1,\"top_indices\":[[0]]}\n"
          "{\"rank\":0,\"step\":6,\"layer\":1,\"top_indices\":[[1]]}\n"
          "{\"rank\":0,\"step\":9,\"layer\":1,\"top_indices\":[[1]]}\n",
          2, "4:1: 1 1; 9:1: 0 1" },
        { "layers of further tokens come last", "r.jsonl",
          "{\"step\":1,\"block\":\"mtp\",\"mtp_idx\":0,\"layer\":1,\"top_indices\":[[1]]}\n"
          "{\"step\":1,\"block\":\"decoder\",\"layer\":3,\"top_indices\":[[0]]}\n",
          0, "1:3: 1 0; 1:4: 0 1" },
        { "counts of one rank, micro-batches added", "rank0.jsonl",
          "{\"iter\": 100, \"block\": \"decoder\", \"layer\": 3, \"tpe\": [[128, 64], [96, 80]]}\n",
          0, "100:3: 224 144" },
        { "vLLM: physical experts become logical", "v.jsonl",
          "{\"record_type\":\"eplb_load_meta\",\"version\":1}\n"
          "{\"record_type\":\"eplb_load_stats\",\"version\":1,\"step\":7,\"num_ranks\":2,"
          "\"expert_load\":[[10,1,5,2],[2,8,1,0]],\"p2l_map\":[[0,1,2,0],[1,0,2,-1]]}\n",
          0, "7:0: 12 1 5; 7:1: 8 2 1" },
        { "SGLang as JSON, one step", "s.json", "{\"logical_count\":\n [[1,2],[3,4]]}",
          0, "0:0: 1 2; 0:1: 3 4" },
        { "SGLang as JSON, two steps", "s.json", "{\"logical_count\": [[[1,2]],[[3,4]]]}",
          0, "0:0: 1 2; 1:0: 3 4" },
        { "not JSON", "r.jsonl", "{\"step\":4,\"layer\":1,\"top_indices\":[[0]]}\n{\"step\"\n",
          0, "r.jsonl:2: not JSON: it ends too early, after 7 bytes" },
        { "no known record", "r.jsonl", "{\"step\":4}\n", 0,
          "r.jsonl:1: no known record; expected top_indices or tpe "
          "(Megatron), record_type (vLLM) or "
          "logical_count (SGLang)" },
        { "an expert that cannot be", "r.jsonl",
          "{\"step\":4,\"layer\":1,\"top_indices\":[[8192]]}\n",
          0, "r.jsonl:1: top_indices of token 0: an expert must be a whole number from 0 to 8191" },
        { "counts without a rank", "r.jsonl", "{\"iter\":1,\"layer\":3,\"tpe\":[[1]]}\n", 0,
          "r.jsonl:1: counts of one rank's experts; its number is in the name of its file, as in "
          "rank3.jsonl" },
        { "a negative count", "rank0.jsonl", "{\"iter\":1,\"layer\":3,\"tpe\":[[1,-1]]}\n", 0,
          "rank0.jsonl:1: a load is not a finite number from 0" },
        { "not a number", "rank0.jsonl", "{\"iter\":1,\"layer\":3,\"tpe\":[[1,NaN]]}\n", 0,
          "rank0.jsonl:1: a load is not a finite number from 0" },
        { "micro-batches of two shapes", "rank0.jsonl",
          "{\"iter\":1,\"layer\":3,\"tpe\":[[1],[1,2]]}\n",
          0, "rank0.jsonl:1: tpe: micro-batch 1 has 2 experts instead of 1" },
        { "a layer that is missing in a step", "r.jsonl",
          "{\"step\":4,\"layer\":1,\"top_indices\":[[0]]}\n{\"step\":4,"
          "\"layer\":2,\"top_indices\":[[0]]}\n"
          "{\"step\":5,\"layer\":1,\"top_indices\":[[0]]}\n",
          0, "r.jsonl: the window from step 5 has nothing of layer 2" },
        { "a map without an expert", "v.jsonl",
          "{\"record_type\":\"eplb_load_stats\",\"version\":1,\"step\":7,\"expert_load\":[[10,1]],"
          "\"p2l_map\":[[0,2]]}\n",
          0, "v.jsonl:1: layer 0: p2l_map names no expert for slot 1" },
        { "a version to come", "v.jsonl",
          "{\"record_type\":\"eplb_load_stats\",\"version\":2,\"step\":7,\"expert_load\":[[1]]}\n",
          0, "v.jsonl:1: key 'version' is 2, expected a whole number from 1 to 1" },
        { "nothing", "r.jsonl", "", 0, "r.jsonl: no loads in it" },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        write_bytes(rows[i].name, rows[i].lines, strlen(rows[i].lines));
        expect(rows[i].what, rows[i].name, rows[i].window_steps, rows[i].loads);
    }
}

static void a_folder_is_one_run(void **state)
{
    (void)state;
    char *path = path_of("run");
    assert_int_equal(mkdir(path, 0700), 0);
    assert_true(trace_is_one(path));
    free(path);
    static const struct {
        const char *name, *lines;
    } file[] = {
        { "run/rank0.jsonl", "{\"iter\":1,\"layer\":3,\"tpe\":[[1,2]]}\n" },
        { "run/rank1.jsonl", "{\"iter\":1,\"layer\":5,\"tpe\":[[7,8]]}\n" },
        { "run/rank10.jsonl", "{\"iter\":1,\"layer\":3,\"tpe\":[[5,6]]}\n" },
        { "run/rank2.jsonl", "{\"iter\":1,\"layer\":3,\"tpe\":[[3,4]]}\n" },
        { "run/rank3.jsonl", "{\"iter\":1,\"layer\":5,\"tpe\":[[9,10]]}\n" },
    };
    for (size_t i = 0; i < sizeof file / sizeof *file; i++)
        write_bytes(file[i].name, file[i].lines, strlen(file[i].lines));
    expect("ranks hold their experts one after the other, per layer", "run", 0,
           "1:3: 1 2 3 4 5 6; 1:5: 7 8 9 10 0 0");
}

/* ---- torch ----------------------------------------------------------------------------------- */

/* Writes what torch.save would, without having it: its classes by their names. */
static const char maker[] =
    "import io, pickle, struct, sys, types, zipfile\n"
    "def module(name, **names):\n"
    "    m = sys.modules[name] = types.ModuleType(name)\n"
    "    for k, v in names.items():\n"
    "        setattr(m, k, v); v.__module__ = name; v.__qualname__ = v.__name__ = k\n"
    "class IntStorage: code = 'i'\n"
    "class LongStorage: code = 'q'\n"
    "class FloatStorage: code = 'f'\n"
    "module('torch', IntStorage=IntStorage, LongStorage=LongStorage, FloatStorage=FloatStorage)\n"
    "def _rebuild_tensor_v2(*args): pass\n"
    "module('torch._utils', _rebuild_tensor_v2=_rebuild_tensor_v2)\n"
    "import collections\n"
    "class Storage:\n"
    "    def __init__(self, kind, values): self.kind, self.values = kind, values\n"
    "class Tensor:\n"
    "    def __init__(self, kind, shape, values, stride=None):\n"
    "        self.storage, self.shape, self.stride = Storage(kind, values), shape, stride\n"
    "        if not stride:\n"
    "            self.stride = tuple(__import__('math').prod(shape[i + 1:]) "
    "for i in range(len(shape)))\n"
    "    def __reduce__(self):\n"
    "        return (_rebuild_tensor_v2, (self.storage, 0, self.shape, self.stride, False,\n"
    "                collections.OrderedDict()))\n"
    "class Pickler(pickle.Pickler):\n"
    "    def persistent_id(self, o):\n"
    "        if isinstance(o, Storage):\n"
    "            self.files.append(o)\n"
    "            return ('storage', o.kind, str(len(self.files) - 1), 'cpu', len(o.values))\n"
    "def save(path, value):\n"
    "    out = io.BytesIO(); p = Pickler(out, protocol=2); p.files = []; p.dump(value)\n"
    "    with zipfile.ZipFile(path, 'w') as z:\n"
    "        z.writestr('archive/data.pkl', out.getvalue())\n"
    "        for i, s in enumerate(p.files):\n"
    "            z.writestr(f'archive/data/{i}', "
    "struct.pack(f'<{len(s.values)}{s.kind.code}', *s.values))\n"
    "save('stat.pt', dict(rank=0, logical_count=Tensor(IntStorage, (2, 2, 3), range(12)),\n"
    "     average_utilization_rate_over_window=None))\n"
    "for rank in (0, 1):\n"
    "    save(f'passes/rank{rank}.pt', dict(records=[dict(forward_pass_id=5, "
    "rank=rank, gatherer_key='primary',\n"
    "         misc=(1.5, True, -3, 70000, 2 ** 40, [[]]),\n"
    "         global_physical_count=Tensor(LongStorage, (1, 4), [1, 2, 3, 4]))],\n"
    "         last_physical_to_logical_map=Tensor(LongStorage, (1, 4), [0, 1, 2, 0])))\n"
    "save('float.pt', dict(logical_count=Tensor(FloatStorage, (1, 1, 2), [0.5, 1.5])))\n"
    "save('negative.pt', dict(logical_count=Tensor(IntStorage, (1, 1, 2), [1, -1])))\n"
    "save('shape.pt', dict(logical_count=Tensor(IntStorage, (1, 2), [1, 1])))\n"
    "save('beyond.pt', dict(logical_count=Tensor(IntStorage, (1, 1, 2), [1, 1], (2, 2, 2))))\n"
    "save('other.pt', dict(weights=[1]))\n"
    "class Evil:\n"
    "    def __reduce__(self): return (exec, ('raise SystemExit(9)',))\n"
    "save('evil.pt', dict(logical_count=Evil()))\n";

static void recorder_dumps_are_read(void **state)
{
    (void)state;
    static const struct {
        const char *what, *name, *loads;
    } rows[] = {
        { "mode stat", "stat.pt", "0:0: 0 1 2; 0:1: 3 4 5; 1:0: 6 7 8; 1:1: 9 10 11" },
        { "one file per rank, passes", "passes", "5:0: 10 4 6" },
        { "floats", "float.pt", "0:0: 0.5 1.5" },
        { "a negative count", "negative.pt", "negative.pt: a load is not a finite number from 0" },
        { "another shape", "shape.pt",
          "shape.pt: logical_count: expected a tensor of steps, layers and experts" },
        { "not a recorder's", "other.pt",
          "other.pt: no logical_count, nor records with a last_physical_to_logical_map; a dump of "
          "SGLang's recorder is expected" },
    };
    char *path = path_of("make.py");
    char *command = xasprintf("cd %s && mkdir -p passes && python3 make.py", folder);
    write_bytes("make.py", maker, strlen(maker));
    assert_int_equal(system(command), 0);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        expect(rows[i].what, rows[i].name, 0, rows[i].loads);
    char *text = say("evil.pt", 0);
    assert_non_null(strstr(text, "it would call something; only values and tensors are read"));
    free(text);
    text = say("beyond.pt", 0);
    assert_non_null(strstr(text, "a tensor reaches beyond its storage"));
    free(text);
    free(command);
    free(path);
}

/* Any damage is refused or read, never worse. */
static void damaged_dumps_do_no_harm(void **state)
{
    (void)state;
    static const char *const names[] = { "stat.pt", "passes/rank0.pt" };
    static uint8_t bytes[1 << 14], copy[1 << 14];
    uint64_t random = 1;
    for (size_t f = 0; f < sizeof names / sizeof *names; f++) {
        char *path = path_of(names[f]);
        FILE *file = fopen(path, "rb");
        assert_non_null(file);
        size_t n = fread(bytes, 1, sizeof bytes, file);
        fclose(file);
        free(path);
        for (int i = 0; i < 20000; i++) {
            struct trace t = { .path = "damaged" };
            struct err err;
            memcpy(copy, bytes, n);
            for (int k = 0; k < 1 + i % 4; k++) {
                random = random * 6364136223846793005u + 1442695040888963407u;
                copy[(random >> 33) % n] = (uint8_t)(random >> 20);
            }
            (void)trace_sglang(&t, copy, i % 8 ? n : n * (size_t)(i % 97) / 97, &err);
            for (size_t r = 0; r < t.n_records; r++)
                free(t.record[r].load);
            free(t.record);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lines_are_read),
        cmocka_unit_test(a_folder_is_one_run),
        cmocka_unit_test(recorder_dumps_are_read),
        cmocka_unit_test(damaged_dumps_do_no_harm),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
