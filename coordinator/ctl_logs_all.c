/* ctl_logs_all.c - logs of all ranks as one stream, by when the coordinator got each line
 *
 * Of each rank some lines are read ahead. The one that came first is printed once every rank has
 * one, or has nothing more at present. With -f the ranks are asked again and again, not more than
 * so many a second: what comes between two rounds is in order, too. */
#include "coordinator/ctl_logs.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/clock.h"

#define AHEAD_BYTES_MAX (8u << 20) /* of all ranks together */
#define PIECE_BYTES_MIN (4u << 10)
#define PIECE_BYTES_MAX (256u << 10)
#define ROUND_NS        (NS_PER_S / 2)
#define RANKS_PER_S     200

struct log_line {
    char    *text;
    size_t   n;
    int64_t  at_ns;
    uint32_t rank;
};

/* Of one rank. */
struct source {
    struct log_line *lines; /* those from first on are not printed yet */
    size_t  first, n_lines, n_alloc;
    struct log_line rest;   /* without its end; n 0: none */
    uint64_t offset;        /* of what is read next */
    bool     is_drained, has_ended;
};

struct merge {
    struct ctl *c;
    Ballast__LogsRequest request;
    struct source *sources;
    uint32_t n_ranks;
    int      width;          /* of a rank's number */
    struct log_line *kept;   /* with --tail: before any is printed */
    size_t   n_kept, n_kept_alloc;
};

/* ---- reading ahead --------------------------------------------------------------------------- */

static int64_t came_at(const Ballast__LogsReply *reply, uint64_t offset)
{
    int64_t at_ns = 0;
    for (size_t i = 0; i < reply->n_times && reply->times[i]->offset <= offset; i++)
        at_ns = reply->times[i]->at_ns;
    return at_ns;
}

static void add_part(struct log_line *line, const char *text, size_t n)
{
    line->text = xrealloc(line->text, line->n + n + 1);
    memcpy(line->text + line->n, text, n);
    line->n += n;
}

static void add_line(struct source *s)
{
    s->lines = xgrow(s->lines, s->n_lines, &s->n_alloc, sizeof *s->lines);
    s->lines[s->n_lines++] = s->rest;
    s->rest = (struct log_line){0};
}

static void take(struct source *s, uint32_t rank, const Ballast__LogsReply *reply)
{
    const char *text = (const char *)reply->bytes.data;
    size_t n = reply->bytes.len, n_part;
    for (size_t at = 0; at < n; at += n_part) {
        const char *newline = memchr(text + at, '\n', n - at);
        n_part = newline ? (size_t)(newline - text) - at : n - at;
        if (!s->rest.n)
            s->rest.at_ns = came_at(reply, reply->next_offset - n + at);
        s->rest.rank = rank;
        add_part(&s->rest, text + at, n_part);
        if (newline)
            add_line(s);
        n_part += newline != NULL;
    }
    s->offset = reply->next_offset;
}

static int read_ahead(struct merge *m, uint32_t rank)
{
    struct source *s = &m->sources[rank];
    const Ballast__LogsReply *reply;
    m->request.rank = rank;
    m->request.offset = s->offset;
    int rc = logs_poll(m->c, &m->request, &reply);
    if (rc != CTL_OK)
        return rc;
    s->first = s->n_lines = 0;
    s->is_drained = reply->bytes.len < m->request.limit_bytes;
    s->has_ended = reply->ended;
    take(s, rank, reply);
    return CTL_OK;
}

/* ---- printing -------------------------------------------------------------------------------- */

static void print(const struct merge *m, const struct log_line *line)
{
    if (m->c->format == CTL_JSON) {
        logs_print_json(line->rank, line->text, line->n);
        return;
    }
    printf("%*" PRIu32 ": ", m->width, line->rank);
    ctl_print_escaped(stdout, line->text, line->n, false);
    putchar('\n');
}

/* Takes the line. */
static void show(struct merge *m, struct log_line line)
{
    if (m->c->has_tail) {
        m->kept = xgrow(m->kept, m->n_kept, &m->n_kept_alloc, sizeof *m->kept);
        m->kept[m->n_kept++] = line;
        return;
    }
    print(m, &line);
    free(line.text);
}

/* From now on lines are printed as they come. */
static void end_tail(struct merge *m)
{
    for (size_t i = 0; i < m->n_kept; i++) {
        if (m->n_kept - i <= m->c->tail)
            print(m, &m->kept[i]);
        free(m->kept[i].text);
    }
    m->n_kept = 0;
    m->c->has_tail = false;
}

/* ---- merging --------------------------------------------------------------------------------- */

/* The rank whose line came first, of which every rank has one to compare; NULL: there is none. */
static int find_first(struct merge *m, struct source **out)
{
    *out = NULL;
    for (uint32_t r = 0; r < m->n_ranks; r++) {
        struct source *s = &m->sources[r];
        int rc = CTL_OK;
        while (s->first == s->n_lines && !s->is_drained && rc == CTL_OK)
            rc = read_ahead(m, r);
        if (rc != CTL_OK)
            return rc;
        if (s->first < s->n_lines &&
            (!*out || s->lines[s->first].at_ns < (*out)->lines[(*out)->first].at_ns))
            *out = s;
    }
    return CTL_OK;
}

/* All that there is at present. */
static int show_present(struct merge *m)
{
    struct source *s;
    int rc;
    for (uint32_t r = 0; r < m->n_ranks; r++)
        m->sources[r].is_drained = false;
    while ((rc = find_first(m, &s)) == CTL_OK && s)
        show(m, s->lines[s->first++]);
    fflush(stdout);
    return rc;
}

static bool all_have_ended(const struct merge *m)
{
    uint32_t n = 0;
    while (n < m->n_ranks && m->sources[n].has_ended)
        n++;
    return n == m->n_ranks;
}

static void wait_for_more(const struct merge *m)
{
    uint64_t wait_ns = (uint64_t)m->n_ranks * NS_PER_S / RANKS_PER_S;
    uint64_t until_ns = clock_now_ns() + (wait_ns > ROUND_NS ? wait_ns : ROUND_NS);
    while (!ctl_interrupts && clock_now_ns() < until_ns)
        nanosleep(&(struct timespec){.tv_nsec = 50 * 1000 * 1000}, NULL);
}

static int show_stream(struct merge *m)
{
    int rc = CTL_OK;
    for (uint32_t r = 0; r < m->n_ranks && m->c->has_tail && rc == CTL_OK; r++) {
        m->request.rank = r;
        rc = logs_find_tail(m->c, &m->request, m->request.limit_bytes, &m->sources[r].offset);
    }
    if (rc == CTL_OK)
        rc = show_present(m);
    while (rc == CTL_OK && m->c->follow && !all_have_ended(m)) {
        end_tail(m);
        fflush(stdout);
        wait_for_more(m);
        rc = ctl_interrupts ? CTL_SIGNAL + SIGINT : show_present(m);
    }
    for (uint32_t r = 0; r < m->n_ranks && rc == CTL_OK; r++)
        if (m->sources[r].rest.n) {
            show(m, m->sources[r].rest);
            m->sources[r].rest = (struct log_line){0};
        }
    end_tail(m);
    return rc;
}

static void merge_fini(struct merge *m)
{
    for (uint32_t r = 0; r < m->n_ranks; r++) {
        struct source *s = &m->sources[r];
        for (size_t i = s->first; i < s->n_lines; i++)
            free(s->lines[i].text);
        free(s->lines);
        free(s->rest.text);
    }
    free(m->sources);
    free(m->kept);
}

int logs_show_all(struct ctl *c, job_id id)
{
    struct merge m = {.c = c, .request = BALLAST__LOGS_REQUEST__INIT};
    const Ballast__LogsReply *reply;
    m.request.job_id = id;
    m.request.limit_bytes = PIECE_BYTES_MIN;
    int rc = logs_poll(c, &m.request, &reply);
    if (rc != CTL_OK)
        return rc;
    m.n_ranks = reply->n_ranks;
    m.sources = xcalloc(m.n_ranks + 1, sizeof *m.sources);
    m.width = snprintf(NULL, 0, "%" PRIu32, m.n_ranks ? m.n_ranks - 1 : 0);
    uint32_t share = AHEAD_BYTES_MAX / (m.n_ranks + 1);
    m.request.limit_bytes = share < PIECE_BYTES_MIN ? PIECE_BYTES_MIN
                          : share > PIECE_BYTES_MAX ? PIECE_BYTES_MAX : share;
    m.request.with_times = true;
    rc = show_stream(&m);
    merge_fini(&m);
    return rc;
}
