/* short_turns.c - asks the scheduler for short turns */
#include "worker/short_turns.h"

#include <linux/sched.h>
#include <linux/sched/types.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/types.h"

#define TURN_NS (NS_PER_MS / 10)

void short_turns_ask(void)
{
    struct sched_attr how = {.size = sizeof how, .sched_flags = SCHED_FLAG_KEEP_POLICY,
                             .sched_nice = getpriority(PRIO_PROCESS, 0),
                             .sched_runtime = TURN_NS};
    syscall(SYS_sched_setattr, 0, &how, 0); /* as well as it goes */
}
