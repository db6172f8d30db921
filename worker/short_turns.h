/* short_turns.h - threads that run as soon as they wake, for a moment, beside those that compute */
#ifndef WORKER_SHORT_TURNS_H
#define WORKER_SHORT_TURNS_H

/* The calling thread asks for short turns, for which Linux 6.12 and newer let it wait less: else it
 * waits milliseconds for a core whose rank computes. It gets no more of the core than before. Needs
 * no rights; without effect elsewhere. */
void short_turns_ask(void);

#endif
