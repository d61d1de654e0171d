#pragma once
/// Any torch::nn::Module of LibTorch under Tranche's Engine: Unit and Units (libtorch/unit.h), Trainer
/// (libtorch/trainer.h), account_memory (libtorch/memory.h), SynchronizedBatchNorm. Header-only; needs
/// LibTorch 2.1 or later with the C++11 ABI, which find_package(tranche COMPONENTS libtorch) looks for. The
/// guide: docs/guides/libtorch.md.
///
/// Not part of <tranche/tranche.h>. The namespace is not tranche::torch, lest `using namespace tranche` make
/// torch:: ambiguous.

#include "tranche/libtorch/batch_norm.h"
#include "tranche/libtorch/memory.h"
#include "tranche/libtorch/trainer.h"
#include "tranche/libtorch/unit.h"
#include "tranche/tranche.h"
