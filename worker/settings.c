/* settings.c - one slot, filled by the channel's thread */
#include "worker/settings.h"

#include "proto/job_live.h"

void settings_init(struct settings *s)
{
    *s = (struct settings){0};
    pthread_mutex_init(&s->lock, NULL);
    ballast__job_spec__init(&s->arrived);
    ballast__job_spec__init(&s->spec);
}

void settings_fini(struct settings *s)
{
    pthread_mutex_destroy(&s->lock);
}

void settings_arrive(struct settings *s, const Ballast__Settings *message)
{
    if (!message->spec)
        return;
    pthread_mutex_lock(&s->lock);
    if (message->revision > s->arrived_revision) {
        s->arrived_revision = message->revision;
        job_live_copy(&s->arrived, message->spec);
    }
    pthread_mutex_unlock(&s->lock);
}

uint32_t settings_look(struct settings *s)
{
    pthread_mutex_lock(&s->lock);
    if (s->arrived_revision > s->revision) {
        s->revision = s->arrived_revision;
        s->spec = s->arrived;
    }
    pthread_mutex_unlock(&s->lock);
    return s->revision;
}

void settings_take(const struct settings *s, Ballast__JobSpec *spec)
{
    job_live_copy(spec, &s->spec);
}
