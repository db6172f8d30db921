/* trainer.h - the child process that trains: one rank of one attempt */
#ifndef WORKER_TRAINER_H
#define WORKER_TRAINER_H

/* Reads START from fd (channel.h), trains, reports, and returns the exit code: 0 after
 * RANK_FINISHED or RANK_STOPPED was sent, 1 after RANK_FAILED. Log lines go to stdout. */
int trainer_main(int fd);

#endif
