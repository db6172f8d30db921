/* link_address.h - who is at the other end, from ZeroMQ's Peer-Address
 *
 * On ipc libzmq appends the kernel's word, ":uid:gid:pid". link_address_check and
 * link_own_user are in link.h. */
#ifndef COMMON_LINK_ADDRESS_H
#define COMMON_LINK_ADDRESS_H

/* The user's name, "uid-N" for one without a name, "anonymous" where the kernel said nothing.
 * Gives, freed with free(). */
char *link_address_user(const char *peer_address);

#endif
