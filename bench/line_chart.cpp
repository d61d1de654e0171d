// line_chart IN.json OUT.svg: draws a line chart, such as those of scripts/learning.py, in the style of the
// program's own plots.
//   {"title": T, "subtitle": T, "x_label": T, "y_label": T, "logarithmic_x": false,
//    "series": [{"name": T, "x": [numbers], "y": [numbers]}, ...]}
// Exit status: 0 on success, 2 for wrong arguments or a file that is not such a chart.

#include "report/plot.h"

#include <fmt/format.h>

#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace {

tranche::plot::LineChart chart_of(const nlohmann::json& json) {
  using namespace tranche::plot;
  LineChart chart;
  chart.title = json.at("title").get<std::string>();
  chart.subtitle = json.at("subtitle").get<std::string>();
  chart.x_label = json.at("x_label").get<std::string>();
  chart.y_label = json.at("y_label").get<std::string>();
  chart.logarithmic_x = json.value("logarithmic_x", false);
  constexpr Shape shapes[] = {Shape::circle, Shape::square, Shape::triangle, Shape::diamond};
  for (const nlohmann::json& of : json.at("series")) {
    const std::size_t index = chart.series.size();
    LineSeries series;
    series.name = of.at("name").get<std::string>();
    series.color = color(Palette::category, static_cast<int>(index));
    series.shape = shapes[index % std::size(shapes)];
    series.x = of.at("x").get<std::vector<double>>();
    series.y = of.at("y").get<std::vector<double>>();
    chart.series.push_back(std::move(series));
  }
  return chart;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    fmt::print(stderr, "line_chart: takes two arguments, IN.json and OUT.svg\n");
    return 2;
  }
  try {
    std::ifstream in(argv[1]);
    if (!in) throw std::runtime_error("cannot be read");
    const std::string svg = tranche::plot::to_svg(chart_of(nlohmann::json::parse(in)));
    std::ofstream out(argv[2]);
    if (!(out << svg).flush()) throw std::runtime_error(fmt::format("'{}' cannot be written", argv[2]));
  } catch (const std::exception& error) {
    fmt::print(stderr, "line_chart: {}: {}\n", argv[1], error.what());
    return 2;
  }
  return 0;
}
