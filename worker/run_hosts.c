/* run_hosts.c - the ranks of a run that are on several machines find each other
 *
 * Each makes its keys and listens before it tells, so whoever hears of it can connect. The daemon,
 * the coordinator and the other daemons pass on what it told; nothing secret is in it. */
#include "worker/run_hosts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "worker/coll_wire.h"
#include "worker/machine.h"
#include "worker/gang.h"

/* The number of the first rank on the same. */
static void number_hosts(const Ballast__Start *s, struct run_hosts *h)
{
    h->hosts = xcalloc(s->n_gang, sizeof *h->hosts);
    for (uint32_t r = 0; r < s->n_gang; r++) {
        uint32_t first = 0;
        while (strcmp(s->gang[first]->machine, s->gang[r]->machine) != 0)
            first++;
        h->hosts[r] = first;
        h->n_hosts += first == r;
    }
}

/* An address of one machine alone is of no use on another. */
static int check_peers(const Ballast__Start *s, const Ballast__Peers *all, struct err *err)
{
    const char *mine = s->gang[s->rank]->machine;
    if (all->n_peers != s->n_gang)
        return err_set(err, -EPROTO, "%zu ranks have told where they listen, of %zu", all->n_peers,
                       s->n_gang);
    for (size_t r = 0; r < all->n_peers; r++) {
        const char *address = all->peers[r]->address;
        int rc = all->peers[r]->key.len == WIRE_KEY_BYTES ? wire_address_check(address, err)
                                                          : err_set(err, -EPROTO, "no key");
        if (rc < 0)
            return err_prefix(err, "rank %zu", r);
        if (wire_is_loopback(address) && !machine_has_same_kernel(mine, s->gang[r]->machine))
            return err_set(err, -EINVAL, "rank %zu listens at %s, which rank %u on another machine "
                           "cannot reach: set data_address in the configuration of worker %s", r,
                           address, s->rank, s->gang[r]->worker);
    }
    return 0;
}

int run_hosts_open(struct run *run, uint64_t timeout_ns, struct run_hosts *out, struct err *err)
{
    const Ballast__Start *s = run->start;
    struct run_wishes *wishes = run->wishes;
    const Ballast__Peers *all;
    int rc;
    *out = (struct run_hosts){0};
    number_hosts(s, out);
    if (out->n_hosts == 1)
        return 0;
    if (!wishes->tell || !wishes->gang)
        return err_set(err, -ENOTSUP, "the ranks are on several machines, and nobody relays");
    if ((rc = wire_open(s->data_address, &out->coll.wire, err)) < 0)
        return rc;
    wishes->tell(wishes->tell_user, wire_address(out->coll.wire), wire_key(out->coll.wire));
    if ((rc = gang_wait(wishes->gang, &wishes->cancelled, timeout_ns, &all, err)) < 0 ||
        (rc = check_peers(s, all, err)) < 0) {
        wire_close(out->coll.wire);
        return rc;
    }
    out->peers = xcalloc(all->n_peers, sizeof *out->peers);
    for (size_t r = 0; r < all->n_peers; r++)
        out->peers[r] = (struct wire_peer){all->peers[r]->address, all->peers[r]->key.data};
    out->coll.hosts = out->hosts;
    out->coll.peers = out->peers;
    return 0;
}

void run_hosts_fini(struct run_hosts *h)
{
    free(h->hosts);
    free(h->peers);
}
