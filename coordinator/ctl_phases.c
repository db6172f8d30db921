/* ctl_phases.c - where the time of steps goes: parts of a step for a line, phases for a table */
#include "coordinator/ctl_phases.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define PHASES_MAX 64u /* kinds that are told apart */

static enum phases_part part_of(const char *name)
{
    static const struct {
        const char *name;
        enum phases_part part;
    } rows[] = {
        {"gather", PHASES_GATHER},         {"dispatch", PHASES_DISPATCH},
        {"reduce", PHASES_REDUCE},         {"agree", PHASES_AGREE},
        {"data", PHASES_DATA},             {"optimizer", PHASES_OPTIMIZER},
        {"migration", PHASES_REST},        {"validation", PHASES_REST},
        {"checkpoint", PHASES_REST},       {"gather_hidden", PHASES_HIDDEN},
        {"dispatch_hidden", PHASES_HIDDEN}, {"reduce_hidden", PHASES_HIDDEN},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (!strcmp(rows[i].name, name))
            return rows[i].part;
    return PHASES_COMPUTE;
}

double phases_ms(const Ballast__StepReport *s, enum phases_part part)
{
    double seconds = 0;
    for (size_t i = 0; i < s->n_phases; i++) {
        enum phases_part own = part_of(s->phases[i]->name);
        if (own == part || (part == PHASES_STEP && own != PHASES_HIDDEN))
            seconds += s->phases[i]->seconds;
    }
    return s->n_phases ? 1e3 * seconds : (double)NAN;
}

/* ---- the table ------------------------------------------------------------------------------- */

struct phase_sum {
    const char *name; /* of the first step that has it */
    double      sum, max;
    uint64_t    at;
};

static struct phase_sum *sum_of(struct phase_sum *all, size_t *n, const char *name)
{
    for (size_t i = 0; i < *n; i++)
        if (!strcmp(all[i].name, name))
            return &all[i];
    if (*n == PHASES_MAX)
        return NULL;
    all[*n] = (struct phase_sum){.name = name};
    return &all[(*n)++];
}

static void add(struct phase_sum *p, double seconds, uint64_t step)
{
    p->sum += seconds;
    if (seconds > p->max) {
        p->max = seconds;
        p->at = step;
    }
}

static void print_sum(struct ctl_table *t, const struct phase_sum *p, double n_steps, double whole)
{
    bool is_part = part_of(p->name) != PHASES_HIDDEN;
    ctl_table_cell(t, "%s", p->name);
    ctl_table_number(t, "%.2f", 1e3 * p->sum / n_steps);
    ctl_table_number(t, "%.1f %%", is_part && whole > 0 ? 100 * p->sum / whole : (double)NAN);
    ctl_table_number(t, "%.2f", 1e3 * p->max);
    ctl_table_number(t, "%.0f", p->max > 0 ? (double)p->at : (double)NAN);
}

void ctl_print_phases(const struct ctl *c, const void *const *steps, size_t n_steps)
{
    static const struct ctl_column columns[] = {
        {"PHASE", false, 15}, {"MEAN-MS", true, 9}, {"SHARE", true, 7}, {"MAX-MS", true, 9},
        {"IN-STEP", true, 8},
    };
    struct ctl_table t = {.columns = columns, .n_columns = 5};
    struct phase_sum all[PHASES_MAX], whole = {.name = "step"};
    size_t n = 0, n_told = 0;
    for (size_t i = 0; i < n_steps; i++) {
        const Ballast__StepReport *s = steps[i];
        double ms = phases_ms(s, PHASES_STEP);
        if (!isfinite(ms))
            continue;
        n_told++;
        add(&whole, ms / 1e3, s->step);
        for (size_t k = 0; k < s->n_phases; k++) {
            struct phase_sum *p = sum_of(all, &n, s->phases[k]->name);
            if (p)
                add(p, s->phases[k]->seconds, s->step);
        }
    }
    if (!n_told)
        return;
    for (size_t i = 0; i < n; i++)
        if (all[i].max > 0)
            print_sum(&t, &all[i], (double)n_told, whole.sum);
    print_sum(&t, &whole, (double)n_told, whole.sum);
    putchar('\n');
    ctl_table_print(c, &t);
    ctl_table_fini(&t);
}
