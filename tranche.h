#pragma once
/// Everything a user of Tranche includes. Adopting an MPI_Comm: <tranche/comm/mpi.h>.

#include "tranche/engine/config.h"
#include "tranche/engine/engine.h"
#include "tranche/engine/memory_profile.h"
#include "tranche/engine/model_spec.h"
#include "tranche/engine/runtime.h"
#include "tranche/engine/step_result.h"
#include "tranche/engine/training_rule.h"
#include "tranche/version.h"
