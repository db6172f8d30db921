/* hf_rotary.c - reads rotary positions, plain or stretched by YaRN, in both spellings
 *
 * Published: rope_theta, and rope_scaling {type, factor, ...} or null. As transformers writes it:
 * rope_parameters {rope_type, rope_theta, factor, ...}. */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "common/hf_keys.h"
#include "common/hf_text.h"

#define THETA 1e4 /* where a config has none */

static int read_double(const struct json *o, const char *key, double low, double high,
                       double otherwise, double *out, struct err *err)
{
    double x = otherwise;
    int rc = json_get_double(o, key, &x, err);

    if (rc < 0 && !(rc == -ENOENT && !isnan(otherwise)))
        return rc;
    if (rc == 0 && !(x >= low && x <= high))
        return err_set(err, -EINVAL, "key '%s' is %g, expected %g to %g", key, x, low, high);
    *out = x;
    return 0;
}

static int read_yarn(const struct json *o, struct rotary_config *c, struct err *err)
{
    int rc;

    c->yarn = true;
    if ((rc = read_double(o, "factor", 1, 1e6, NAN, &c->factor, err)) < 0 ||
        (rc = read_double(o, "original_max_position_embeddings", 1, 1e9, NAN,
                          &c->original_positions, err)) < 0 ||
        (rc = read_double(o, "beta_fast", 1e-3, 1e6, 32, &c->beta_fast, err)) < 0 ||
        (rc = read_double(o, "beta_slow", 1e-3, 1e6, 1, &c->beta_slow, err)) < 0 ||
        (rc = read_double(o, "mscale", 0, 1e3, 0, &c->mscale, err)) < 0 ||
        (rc = read_double(o, "mscale_all_dim", 0, 1e3, 0, &c->mscale_all_dim, err)) < 0 ||
        (rc = read_double(o, "attention_factor", 1e-3, 1e3, 0, &c->attention_factor, err)) < 0)
        return rc;
    return hf_flag(o, "truncate", true, &c->truncate, err);
}

static int read_scaling(const struct json *o, struct rotary_config *c, struct err *err)
{
    const char *key = hf_spelling(o, "rope_type", "type"), *type = "default";
    char part[64];
    double turned = 1;
    int rc = read_double(o, "partial_rotary_factor", 0, 1, 1, &turned, err);

    if (rc == 0 && turned != 1)
        rc = err_set(err, -ENOTSUP, "key 'partial_rotary_factor' is %g; supported: 1", turned);
    if (rc < 0)
        return rc;
    rc = json_get_string(o, key, &type, err);
    if (rc < 0 && rc != -ENOENT)
        return rc;
    if (strcmp(type, "yarn") == 0)
        return read_yarn(o, c, err);
    if (strcmp(type, "default") == 0)
        return 0;
    return err_set(err, -ENOTSUP, "key '%s' is '%s'; supported: default, yarn", key,
                   hf_shown(type, part));
}

int hf_rotary(const struct json *o, struct model_spec *m, struct err *err)
{
    const char *key = hf_spelling(o, "rope_parameters", "rope_scaling");
    const struct json *scaling = json_get(o, key), *with_theta = o;
    struct rotary_config c = { .dim = m->qk_rope_dim };
    int rc = hf_flag(o, "rope_interleave", true, &m->rotary_interleaved, err);

    if (rc < 0)
        return rc;
    if (m->qk_rope_dim % 2 != 0)
        return err_set(err, -EINVAL, "key 'qk_rope_head_dim' is %u, rotary dims come in pairs",
                       m->qk_rope_dim);
    if (scaling && json_kind_of(scaling) != JSON_OBJECT)
        return err_set(err, -EINVAL, "key '%s' is not an object", key);
    if (json_get(scaling, "rope_theta"))
        with_theta = scaling;
    if ((rc = read_double(with_theta, "rope_theta", 1.001, 1e12, THETA, &c.theta, err)) < 0)
        return rc;
    if (scaling && (rc = read_scaling(scaling, &c, err)) < 0) {
        err_prefix(err, "%s", key);
        return rc;
    }
    m->mla_rotary = true;
    m->rotary = c;
    return 0;
}
