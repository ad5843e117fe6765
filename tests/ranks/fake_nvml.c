/* A stand-in for NVIDIA's management library that reports as many devices as FAKE_NVML says, and can do nothing else. */
#include <stdlib.h>
int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { const char *s = getenv("FAKE_NVML"); *n = s ? atoi(s) : 1; return 0; }
