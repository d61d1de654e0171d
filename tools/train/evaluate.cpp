// tranche evaluate.

#include <fmt/format.h>

#include <ostream>

#include "tools/terminal.h"
#include "tools/train/run.h"

namespace tranche::tools {

int run_evaluate(const Options& options, const Output& output) {
  Run run(options, output);
  return run.execute([&run] {
    ProgressOptions shown;
    shown.terminal = run.output.terminal;
    Progress progress(shown, [&run](std::string_view text) { draw(run.output.out, text); });
    const std::vector<training::Evaluation> held_out = run.validate(0, progress);
    progress.finish();
    const kernels::Digest weights = run.engine->weights_digest(), state = run.engine->state_digest();
    const std::string memory = run.engine->memory_report();
    if (!run.is_root()) return;
    std::ostream& out = run.output.out;
    const std::string of =
        run.resume_source.folder.empty() ? "the initial weights" : run.resume_source.folder;
    for (const training::Evaluation& evaluation : held_out) {
      out << fmt::format("validation loss of {}{}: {:.4f} over {} tokens\n", of,
                         evaluation.set.empty() ? "" : " on " + evaluation.set, evaluation.result.loss,
                         evaluation.result.tokens);
    }
    if (run.options.ngrams) {
      const NgramEntropies entropies = run.ngrams();
      run.report.set_ngrams(entropies);
      out << fmt::format("held-out nats per byte: unigram {:.4f}, bigram {:.4f}, trigram {:.4f}\n",
                         entropies.unigram, entropies.bigram, entropies.trigram);
    }
    if (!run.options.report.empty()) {
      run.report.set_engine(memory, run.engine->traffic_report(), run.engine->model_report());
      run.report.set_digests(weights, state);
      run.report.set_speed({}, run.peak_flops, 0);
      run.report.write();
      out << "report: " << run.options.report << "\n";
    }
    out.flush();
  });
}

}  // namespace tranche::tools
