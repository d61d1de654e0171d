// The adapter with its CUDA parts, compiled as for a GPU; nothing here runs.
#include <tranche/libtorch.h>
