/* check_together.c - what the fields of a message mean together, wherever it is nested */
#include "proto/check_parts.h"

#include <errno.h>
#include <string.h>

#include "proto/job_spec.h"

/* Every range of a job that does not need the model; adds a violation per field, named by its
 * path in the job file. 0 or -EINVAL. */
static int check_job_spec(const Ballast__JobSpec *spec, struct arena *arena,
                          Ballast__Status *out_status)
{
    struct problems problems = {0};
    if (job_spec_check(spec, &problems) == 0) {
        problems_fini(&problems);
        return 0;
    }
    struct walk w = {arena, out_status, false};
    check_status(out_status, arena, BALLAST__CODE__INVALID_ARGUMENT, "BAD_JOB", "%s",
                 problems.n ? problems.items[0].text : "the job is not valid");
    for (size_t i = 0; i < problems.n; i++)
        check_violation(&w, problems.items[i].key, problems.items[i].text);
    problems_fini(&problems);
    return -EINVAL;
}

static int check_placed(struct walk *w, const struct place *at, const Ballast__Placement *p)
{
    struct err err = {0};
    if (!p || check_placement(p, &err) == 0)
        return 0;
    return check_violate_field(w, at, "placement", err.text);
}

static int check_start(struct walk *w, const struct place *at, const Ballast__Start *s)
{
    if (s->rank >= s->n_gang)
        return check_violate_field(w, at, "rank", "is not a rank of the gang");
    int rc = check_placed(w, at, s->placement);
    return rc < 0 ? rc : check_job_spec(s->spec, w->arena, w->status);
}

static int check_prepare(struct walk *w, const struct place *at, const Ballast__Prepare *p)
{
    if (!p->placement->n_layers)
        return check_violate_field(w, at, "placement", "changes no layer");
    if (p->placement->epoch <= p->base_epoch)
        return check_violate_field(w, at, "placement", "is not newer than the one it starts from");
    return check_placed(w, at, p->placement);
}

static int check_load(struct walk *w, const struct place *at, const Ballast__LoadReport *r)
{
    struct err err = {0};
    return check_load_report(r, &err) == 0 ? 0 : check_violate_field(w, at, "layers", err.text);
}

bool check_is_window(const char *word)
{
    static const char *const words[] = {"last", "1m", "1h", "all"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (!strcmp(word, words[i]))
            return true;
    return false;
}

static int check_experts_request(struct walk *w, const struct place *at,
                                 const Ballast__ExpertsRequest *r)
{
    if (*r->window && !check_is_window(r->window))
        return check_violate_field(w, at, "window", "expected last, 1m, 1h or all");
    return r->layer >= -1 && r->layer < (int32_t)LAYERS_MAX
               ? 0 : check_violate_field(w, at, "layer", "is no layer; -1 means all");
}

static int check_backup_request(struct walk *w, const struct place *at,
                                const Ballast__DbBackupRequest *r)
{
    return r->path[0] == '/'
               ? 0 : check_violate_field(w, at, "path", "expected an absolute path, on the "
                                         "coordinator's machine");
}

static int check_rank_state(struct walk *w, const struct place *at, const Ballast__RankState *s)
{
    bool has_told = s->data_address[0] != '\0';
    return s->data_key.len == (has_told ? DATA_KEY_BYTES : 0)
               ? 0 : check_violate_field(w, at, "data_key",
                                         "goes with data_address, 32 bytes long");
}

int check_together(struct walk *w, const struct place *at, const ProtobufCMessage *m)
{
    const ProtobufCMessageDescriptor *d = m->descriptor;
    if (d == &ballast__submit_request__descriptor)
        return check_job_spec(((const Ballast__SubmitRequest *)m)->spec, w->arena, w->status);
    if (d == &ballast__start__descriptor)
        return check_start(w, at, (const Ballast__Start *)m);
    if (d == &ballast__settings__descriptor)
        return check_job_spec(((const Ballast__Settings *)m)->spec, w->arena, w->status);
    if (d == &ballast__rank_state__descriptor)
        return check_rank_state(w, at, (const Ballast__RankState *)m);
    if (d == &ballast__prepare__descriptor)
        return check_prepare(w, at, (const Ballast__Prepare *)m);
    if (d == &ballast__load_report__descriptor)
        return check_load(w, at, (const Ballast__LoadReport *)m);
    if (d == &ballast__experts_request__descriptor)
        return check_experts_request(w, at, (const Ballast__ExpertsRequest *)m);
    if (d == &ballast__db_backup_request__descriptor)
        return check_backup_request(w, at, (const Ballast__DbBackupRequest *)m);
    if (d == &ballast__rebalance_request__descriptor)
        return check_placed(w, at, ((const Ballast__RebalanceRequest *)m)->placement);
    if (d == &ballast__placement_reply__descriptor)
        return check_placed(w, at, ((const Ballast__PlacementReply *)m)->placement);
    return 0;
}
