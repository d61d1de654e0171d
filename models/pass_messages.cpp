#include "models/pass_messages.h"

#include <fmt/core.h>

#include "tranche/engine/engine.h"

namespace tranche::models {

PassLabel::PassLabel(const Pass& pass, std::string_view what)
    : unit(what),
      phase(pass.training ? fmt::format("micro-batch {}", pass.engine.micro_batch()) : "forward pass") {}

void wait_for(const Pass& pass, const Event& done) {
  if (pass.training) {
    pass.engine.wait_for_message(done);
  } else {
    pass.engine.compute_stream().wait(done);
  }
}

}  // namespace tranche::models
