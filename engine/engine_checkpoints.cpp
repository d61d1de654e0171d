// Saving and loading, with the checks of when they may be called.

#include "engine/engine_impl.h"

namespace tranche {

using namespace detail;

std::string Engine::Impl::save(const std::string& directory, const SaveOptions& options) {
  require(sequence.idle(),
          "save() inside a step or an evaluation; save between step() and the next micro-batch");
  loader.require_whole_state("save()");
  if (options.keep_last < 0 || options.keep_every < 0) {
    throw InvalidArgument("save() with keep_last " + std::to_string(options.keep_last) + " and keep_every " +
                          std::to_string(options.keep_every) + "; both must be at least 0");
  }
  set_phase("save");
  const bool without_base = config.lora.leaves_base_out();
  if (without_base) (void)base.digest();
  try {
    std::string path = session.save(directory, options, progress.steps(), progress.proven(),
                                    [&](checkpoint::Manifest& manifest) {
                                      run_record.describe(manifest);
                                      manifest.run.user = options.user;
                                      if (without_base) manifest.base = base.record();
                                    });
    set_phase("idle");
    return path;
  } catch (...) {
    set_phase("idle");
    throw;
  }
}

std::string Engine::Impl::finish_saving() {
  require(!sequence.in_pass() && !sequence.in_evaluation(),
          "finish_saving() inside a micro-batch or an evaluation");
  return session.finish();
}

LoadResult Engine::Impl::load(const std::string& path, const LoadOptions& options) {
  require(sequence.idle(),
          "load() inside a step or an evaluation; load before the first micro-batch of a step");
  (void)session.finish();
  set_phase("load");
  LoadResult result = loader.load(path, options);
  set_phase("idle");
  return result;
}

std::string Engine::save(const std::string& directory, const SaveOptions& options) {
  return impl_->guarded([&] { return impl_->save(directory, options); });
}
std::string Engine::finish_saving() {
  return impl_->guarded([&] { return impl_->finish_saving(); });
}
bool Engine::saving() const {
  return impl_->session.in_progress();
}
LoadResult Engine::load(const std::string& path, const LoadOptions& options) {
  return impl_->guarded([&] { return impl_->load(path, options); });
}
void Engine::load_arrays(const std::string& path, const std::vector<ArrayTarget>& targets) {
  impl_->guarded([&] {
    (void)impl_->finish_saving();
    impl_->loader.load_arrays(path, targets);
  });
}
void Engine::request_stop() noexcept {
  impl_->stop_wanted.store(true, std::memory_order_relaxed);
}

}  // namespace tranche
