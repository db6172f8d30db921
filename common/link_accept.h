/* link_accept.h - a bound on the descriptors that foreign connections take from this process */
#ifndef COMMON_LINK_ACCEPT_H
#define COMMON_LINK_ACCEPT_H

/* From now on a connection whose descriptor would be this number or a larger one is closed at
 * once. The kernel gives the lowest that is free, so so many are open then. */
void link_accept_limit(int n_descriptors);

#endif
