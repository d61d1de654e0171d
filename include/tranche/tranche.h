#pragma once
/// Everything a user of Tranche includes: the engine, the kernels, random numbers, memory profiles. Adopting
/// an MPI_Comm: <tranche/comm/mpi.h>.

#include "tranche/core/random.h"
#include "tranche/engine/config.h"
#include "tranche/engine/engine.h"
#include "tranche/engine/model_spec.h"
#include "tranche/engine/runtime.h"
#include "tranche/engine/step_result.h"
#include "tranche/engine/training_rule.h"
#include "tranche/kernels/attention.h"
#include "tranche/kernels/cross_entropy.h"
#include "tranche/kernels/elementwise.h"
#include "tranche/kernels/embedding.h"
#include "tranche/kernels/launch.h"
#include "tranche/kernels/layer_norm.h"
#include "tranche/kernels/matmul.h"
#include "tranche/kernels/optimizer_update.h"
#include "tranche/kernels/reduction.h"
#include "tranche/kernels/rms_norm.h"
#include "tranche/kernels/squared_error.h"
#include "tranche/report/memory_profile.h"
#include "tranche/version.h"
