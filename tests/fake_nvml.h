/* fake_nvml.h - a library that answers as NVML does, about one GPU that the test describes */
#ifndef TESTS_FAKE_NVML_H
#define TESTS_FAKE_NVML_H

/* fake_nvml() of the loaded library gives it. */
struct fake_gpu {
    int result;          /* of every question; 0: it is answered */
    unsigned index;      /* the one that was asked for last */
    char uuid[96];
    unsigned percent, celsius, milliwatts, sm_mhz, memory_mhz;
    unsigned long long used, total, throttle, corrected, uncorrected, link_errors;
    unsigned rows_corrected, rows_uncorrected, remap_pending, remap_failed;
    unsigned long long xids[4]; /* reported one by one, 0 ends them */
    int n_inits;         /* less those that were shut down */
};

typedef struct fake_gpu *(*fake_nvml_fn)(void);

#endif
