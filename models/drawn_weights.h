#pragma once
/// The initializer of a model's weights. Private to models/.

#include "tranche/engine/model_spec.h"

namespace tranche::models {

/// Normal with this standard deviation; zeros for 0, which a config.json may give.
inline Initializer drawn_weights(float standard_deviation) {
  return standard_deviation > 0 ? Initializer::normal(standard_deviation) : Initializer::zeros();
}

}  // namespace tranche::models
