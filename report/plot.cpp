#include "report/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <iterator>
#include <utility>

#include "tranche/core/error.h"

namespace tranche::plot {

namespace {

constexpr double width = 1120, height = 600;
constexpr double left = 92, right = 216, bottom = 64, head = 66;
constexpr double row_height = 20, row_gap = 5;
constexpr double mark_height = 18;  // of a line of labels above the areas
constexpr double letter = 6.3;      // mean width of a letter at 12 pixels
constexpr std::string_view ink = "#222222", faint = "#dddddd";

/// The bytes of the UTF-8 character with which `text` begins; 0 if there is none.
std::size_t character(std::string_view text) {
  const auto first = static_cast<unsigned char>(text.front());
  const std::size_t bytes = first < 0x80   ? 1
                            : first < 0xc2 ? 0
                            : first < 0xe0 ? 2
                            : first < 0xf0 ? 3
                            : first < 0xf5 ? 4
                                           : 0;
  if (bytes > text.size()) return 0;
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xc0) != 0x80) return 0;
  }
  return bytes;
}

/// Escapes text for XML; invalid UTF-8 becomes question marks.
std::string escaped(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t bytes = character(text.substr(i));
    if (bytes != 1) {
      result += bytes == 0 ? "?" : text.substr(i, bytes);
      i += std::max<std::size_t>(bytes, 1);
      continue;
    }
    const char c = text[i++];
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        // XML cannot represent control characters.
        result += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return result;
}

/// Formats coordinates to a tenth of a pixel, without trailing zeros.
std::string at(double value) {
  std::string text = fmt::format("{:.1f}", value);
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text == "-0" ? "0" : text;
}

/// The text if it fits, else its beginning in whole characters, else nothing.
std::string shortened(std::string_view text, double width_left) {
  const auto letters = static_cast<std::size_t>(std::max(width_left / letter, 0.0));
  std::size_t seen = 0, cut = 0;  // cut: after letters - 2 characters
  for (std::size_t i = 0; i < text.size(); ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xc0) == 0x80) continue;
    if (seen + 2 == letters) cut = i;
    ++seen;
  }
  if (seen <= letters) return std::string(text);
  if (letters < 4) return {};
  return std::string(text.substr(0, cut)) + "..";
}

/// The file, built up element by element.
class Svg {
 public:
  /// `description`: the contents of the plot, for readers who do not see it.
  Svg(const std::string& title, const std::string& subtitle, const std::string& description) {
    add(R"(<?xml version="1.0" encoding="UTF-8"?>)"
        "\n"
        R"(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" height="{1}" )"
        R"(font-family="Helvetica, Arial, 'DejaVu Sans', sans-serif" font-size="12" fill="{2}" role="img">)"
        "\n",
        at(width), at(height), ink);
    add("<title>{}</title>\n<desc>{}</desc>\n", escaped(title), escaped(description));
    add(R"(<rect width="{}" height="{}" fill="#ffffff"/>)"
        "\n",
        at(width), at(height));
    text(left, 26, title, R"(font-size="18" font-weight="bold")");
    text(left, 46, subtitle, R"(fill="#555555")");
  }

  void text(double x, double y, std::string_view words, std::string_view attributes = {}) {
    if (words.empty()) return;
    add(R"(<text x="{}" y="{}"{}{}>{}</text>)"
        "\n",
        at(x), at(y), attributes.empty() ? "" : " ", attributes, escaped(words));
  }
  void rect(double x, double y, double w, double h, std::string_view fill, std::string_view attributes = {}) {
    add(R"(<rect x="{}" y="{}" width="{}" height="{}" fill="{}"{}{}/>)"
        "\n",
        at(x), at(y), at(w), at(h), fill, attributes.empty() ? "" : " ", attributes);
  }
  /// A rectangle that shows its name under a resting pointer.
  void band(double x, double y, double w, double h, std::string_view fill, std::string_view name) {
    add(R"(<rect x="{}" y="{}" width="{}" height="{}" fill="{}" stroke="#888888" stroke-width="0.4">)"
        "<title>{}</title></rect>\n",
        at(x), at(y), at(w), at(h), fill, escaped(name));
  }
  void line(double x1, double y1, double x2, double y2, std::string_view stroke,
            std::string_view attributes = {}) {
    add(R"(<line x1="{}" y1="{}" x2="{}" y2="{}" stroke="{}"{}{}/>)"
        "\n",
        at(x1), at(y1), at(x2), at(y2), stroke, attributes.empty() ? "" : " ", attributes);
  }
  void path(std::string_view d, std::string_view attributes) {
    add(R"(<path d="{}" {}/>)"
        "\n",
        d, attributes);
  }
  /// The fill: the colour, or a hatching in it that is defined here.
  std::string fill(const Series& series) {
    if (!series.hatched) return series.color;
    const std::string id = fmt::format("hatch{}", hatchings_++);
    add(R"x(<defs><pattern id="{0}" width="6" height="6" patternUnits="userSpaceOnUse" )x"
        R"x(patternTransform="rotate(45)"><rect width="6" height="6" fill="#ffffff"/>)x"
        R"x(<rect width="2" height="6" fill="{1}"/></pattern></defs>)x"
        "\n",
        id, series.color);
    return "url(#" + id + ")";
  }
  std::string finish() { return std::move(text_) + "</svg>\n"; }

 private:
  template <typename... Arguments>
  void add(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    fmt::format_to(std::back_inserter(text_), format, std::forward<Arguments>(arguments)...);
  }
  std::string text_;
  int hatchings_ = 0;
};

/// Maps numbers to positions on the page.
struct Frame {
  double top = head, base = height - bottom;
  double x0 = left, x1 = width - right;
  double low_x = 0, high_x = 1, high_y = 1;
  double x(double value) const { return x0 + (x1 - x0) * (value - low_x) / (high_x - low_x); }
  double y(double value) const { return base - (base - top) * value / high_y; }
};

void require(bool condition, const char* what) {
  if (!condition) throw InvalidArgument(fmt::format("plot: {}", what));
}

bool usable(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double v) { return std::isfinite(v) && v >= 0; });
}

/// Lines and numbers of the y axis, and its name.
void draw_y_axis(Svg& svg, const Frame& frame, const Ticks& marks, const std::string& name) {
  for (std::size_t i = 0; i < marks.values.size(); ++i) {
    const double y = frame.y(marks.values[i]);
    svg.line(frame.x0, y, frame.x1, y, i == 0 ? ink : faint);
    svg.text(frame.x0 - 8, y + 4, marks.labels[i], R"(text-anchor="end")");
  }
  const double middle = (frame.top + frame.base) / 2;
  svg.text(16, middle, name,
           fmt::format(R"x(text-anchor="middle" transform="rotate(-90 16 {})")x", at(middle)));
}

void draw_x_name(Svg& svg, const Frame& frame, const std::string& name) {
  svg.text((frame.x0 + frame.x1) / 2, height - 14, name, R"(text-anchor="middle")");
}

/// Names beside the plot, the topmost area first.
void draw_legend(Svg& svg, const Frame& frame, const std::vector<Series>& series,
                 const std::vector<std::string>& fills, bool reversed) {
  double y = frame.top + 4;
  for (std::size_t k = 0; k < series.size(); ++k) {
    const std::size_t i = reversed ? series.size() - 1 - k : k;
    svg.rect(frame.x1 + 18, y, 14, 14, fills[i], R"(stroke="#666666" stroke-width="0.6")");
    svg.text(frame.x1 + 38, y + 11, series[i].name);
    y += 22;
  }
}

/// "Stacked areas over seconds: parameters, gradients. Label."; names as in the legend.
template <typename Each>
std::string description(std::string_view kind, const std::string& over, const std::vector<Each>& series,
                        const std::vector<std::string>& more) {
  std::string text = fmt::format("{}{}", kind, over.empty() ? "" : " over " + over);
  std::string_view separator = ": ";
  for (const Each& one : series) {
    if (one.name.empty()) continue;
    text += fmt::format("{}{}", separator, one.name);
    separator = ", ";
  }
  text += ".";
  for (const std::string& sentence : more) {
    if (!sentence.empty()) text += fmt::format(" {}.", sentence);
  }
  return text;
}

std::vector<std::string> fills_of(Svg& svg, const std::vector<Series>& series) {
  std::vector<std::string> fills;
  for (const Series& one : series) fills.push_back(svg.fill(one));
  return fills;
}

void draw_rows(Svg& svg, Frame& frame, const std::vector<BandRow>& rows) {
  for (const BandRow& row : rows) {
    svg.text(frame.x0 - 8, frame.top + 14, row.name, R"(text-anchor="end" fill="#555555")");
    for (const Band& band : row.bands) {
      const double begin = std::clamp(frame.x(band.begin), frame.x0, frame.x1);
      const double end = std::clamp(frame.x(band.end), frame.x0, frame.x1);
      if (end - begin < 0.3) continue;
      svg.band(begin, frame.top, end - begin, row_height, band.color.empty() ? "#ffffff" : band.color,
               band.label);
      const double width_left = static_cast<double>(band.label.size()) * letter * 11 / 12;
      if (width_left > end - begin - 2) continue;  // shortened names would be ambiguous: h.1, h.10, h.11
      svg.text((begin + end) / 2, frame.top + 14, band.label, R"(text-anchor="middle" font-size="11")");
    }
    frame.top += row_height + row_gap;
  }
  if (!rows.empty()) frame.top += 8;
}

}  // namespace

std::string_view color(Palette palette, int index) {
  static constexpr std::array<std::string_view, 8> categories{"#0072b2", "#e69f00", "#009e73", "#d55e00",
                                                              "#56b4e9", "#cc79a7", "#f0e442", "#000000"};
  static constexpr std::array<std::string_view, 4> stages{"#2d1160", "#8c2981", "#de4968", "#fe9f6d"};
  static constexpr std::array<std::string_view, 5> parts{"#9fb3c8", "#7a1f2b", "#b56576", "#4a6a8a",
                                                         "#d9a441"};
  const auto of = [&](const auto& colors) {
    return colors[static_cast<std::size_t>(std::abs(index)) % colors.size()];
  };
  switch (palette) {
    case Palette::stage:
      return of(stages);
    case Palette::part:
      return of(parts);
    case Palette::category:
      break;
  }
  return of(categories);
}

Ticks ticks(double low, double high, Scale scale, int target_count) {
  require(std::isfinite(low) && std::isfinite(high), "an axis that is not finite");
  if (!(high > low)) high = low + 1;
  const double wanted = (high - low) / std::max(target_count, 1);
  double step = 1;
  if (scale == Scale::bytes) {
    step = std::exp2(std::ceil(std::log2(wanted)));
  } else {
    const double decade = std::pow(10.0, std::floor(std::log10(wanted)));
    step = wanted <= decade       ? decade
           : wanted <= 2 * decade ? 2 * decade
           : wanted <= 5 * decade ? 5 * decade
                                  : 10 * decade;
  }
  Ticks result;
  static constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  int unit = 0;
  double one = 1;
  while (scale == Scale::bytes && high >= 1024 * one && unit + 1 < static_cast<int>(std::size(units))) {
    one *= 1024;
    ++unit;
  }
  const double first = std::floor(low / step);
  for (double i = first; i == first || (i - 1) * step < high; ++i) {
    const double value = i * step;
    result.values.push_back(value);
    result.labels.push_back(scale == Scale::bytes ? fmt::format("{:.4g} {}", value / one, units[unit])
                                                  : fmt::format("{:.6g}", value));
  }
  return result;
}

std::string to_svg(const AreaChart& chart) {
  require(chart.edges.size() >= 2 && chart.edges.back() > chart.edges.front(),
          "an area chart without extent");
  std::vector<double> below(chart.edges.size() - 1, 0.0);
  std::vector<double> stacked = below;
  for (const Series& series : chart.series) {
    require(series.values.size() == below.size(), "a series of another length than the chart's edges");
    require(usable(series.values), "a value that is negative or not finite");
    for (std::size_t i = 0; i < stacked.size(); ++i) stacked[i] += series.values[i];
  }
  const double highest = *std::max_element(stacked.begin(), stacked.end());

  std::vector<std::string> marked;
  for (const Mark& mark : chart.marks) marked.push_back(mark.label);
  Svg svg(chart.title, chart.subtitle, description("Stacked areas", chart.x_label, chart.series, marked));
  Frame frame;
  frame.low_x = chart.edges.front();
  frame.high_x = chart.edges.back();
  draw_rows(svg, frame, chart.rows);
  const double labels = frame.top;
  frame.top += mark_height * static_cast<double>(chart.marks.size());
  const Ticks vertical = ticks(0, highest, chart.y_scale);
  frame.high_y = vertical.values.back();
  draw_y_axis(svg, frame, vertical, chart.y_label);
  const std::vector<std::string> fills = fills_of(svg, chart.series);
  for (std::size_t s = 0; s < chart.series.size(); ++s) {
    const std::vector<double>& values = chart.series[s].values;
    std::vector<double> above = below;
    for (std::size_t i = 0; i < above.size(); ++i) above[i] += values[i];
    if (above != below) {
      std::string d;
      // Walks along the top and back along the bottom; equal neighbours are one range.
      const auto walk = [&](const std::vector<double>& heights, bool back) {
        const std::size_t n = heights.size();
        for (std::size_t k = 0; k < n;) {
          std::size_t next = k + 1;
          const double value = heights[back ? n - 1 - k : k];
          while (next < n && heights[back ? n - 1 - next : next] == value) ++next;
          const double from = chart.edges[back ? n - k : k], to = chart.edges[back ? n - next : next];
          d += fmt::format("{}{} {}H{}", d.empty() ? "M" : "L", at(frame.x(from)), at(frame.y(value)),
                           at(frame.x(to)));
          k = next;
        }
      };
      walk(above, false);
      walk(below, true);
      svg.path(d + "Z", fmt::format(R"(fill="{}")", fills[s]));
    }
    below = std::move(above);
  }
  const Ticks horizontal = ticks(frame.low_x, frame.high_x, Scale::number, 10);
  for (std::size_t i = 0; i < horizontal.values.size(); ++i) {
    const double x = frame.x(horizontal.values[i]);
    if (x > frame.x1 + 0.5) continue;
    svg.line(x, frame.base, x, frame.base + 5, ink);
    svg.text(x, frame.base + 19, horizontal.labels[i], R"(text-anchor="middle")");
  }
  draw_x_name(svg, frame, chart.x_label);
  // The labels are above the areas, so that they cover none.
  double label_y = labels;
  for (const Mark& mark : chart.marks) {
    const double x = frame.x(mark.x), y = frame.y(mark.y);
    const double wide = static_cast<double>(mark.label.size()) * letter * 1.2;  // bold
    const double start = std::clamp(x - wide / 2, frame.x0, std::max(frame.x0, frame.x1 - wide));
    svg.text(start + wide / 2, label_y + 13, mark.label, R"(text-anchor="middle" font-weight="bold")");
    svg.line(x, label_y + mark_height - 1, x, y - 9, ink, R"(stroke-width="0.8")");
    svg.line(frame.x0, y, frame.x1, y, ink, R"(stroke-dasharray="5 4")");
    svg.path(fmt::format("M{} {}l-5 -9h10z", at(x), at(y)), fmt::format(R"(fill="{}")", ink));
    label_y += mark_height;
  }
  draw_legend(svg, frame, chart.series, fills, true);
  return svg.finish();
}

namespace {

/// "0: 1.5, 3: 2": the value of each bar, limited to as many as a listener can follow.
std::vector<std::string> values_of(const BarChart& chart) {
  constexpr std::size_t most_bars = 24;
  std::string text;
  for (std::size_t i = 0; i < std::min(chart.notes.size(), most_bars); ++i) {
    std::string label = chart.labels[i];
    std::replace(label.begin(), label.end(), '\n', ' ');
    text += fmt::format("{}{}: {}", text.empty() ? "" : ", ", label, chart.notes[i]);
  }
  return {text};
}

}  // namespace

std::string to_svg(const BarChart& chart) {
  require(!chart.labels.empty() && !chart.series.empty(), "a bar chart without bars");
  require(chart.notes.empty() || chart.notes.size() == chart.labels.size(),
          "notes for some of the bars only");
  double highest = 0;
  for (std::size_t i = 0; i < chart.labels.size(); ++i) {
    double sum = 0;
    for (const Series& series : chart.series) {
      require(series.values.size() == chart.labels.size(), "a series of another length than the labels");
      require(usable(series.values), "a value that is negative or not finite");
      sum = chart.stacked ? sum + series.values[i] : std::max(sum, series.values[i]);
    }
    highest = std::max(highest, sum);
  }
  Svg svg(chart.title, chart.subtitle, description("Bars", chart.x_label, chart.series, values_of(chart)));
  Frame frame;
  frame.high_x = static_cast<double>(chart.labels.size());
  draw_rows(svg, frame, chart.rows);
  if (!chart.notes.empty()) frame.top += 12;
  const Ticks vertical = ticks(0, highest, chart.y_scale);
  frame.high_y = vertical.values.back();
  draw_y_axis(svg, frame, vertical, chart.y_label);
  const std::vector<std::string> fills = fills_of(svg, chart.series);
  const double slot = frame.x(1) - frame.x(0);
  const double used =
      std::min(slot * 0.72, chart.stacked ? 90.0 : 60.0 * static_cast<double>(chart.series.size()));
  const double bar = chart.stacked ? used : used / static_cast<double>(chart.series.size());
  // Labels that would touch are left out evenly.
  std::size_t longest = 1;
  for (const std::string& label : chart.labels) {
    for (std::size_t begin = 0; begin <= label.size();) {
      const std::size_t end = std::min(label.find('\n', begin), label.size());
      longest = std::max(longest, end - begin);
      begin = end + 1;
    }
  }
  const auto every = static_cast<std::size_t>(std::max(
      1.0, std::ceil((static_cast<double>(std::min<std::size_t>(longest, 14)) * letter + 6) / slot)));
  for (std::size_t i = 0; i < chart.labels.size(); ++i) {
    const double middle = frame.x(static_cast<double>(i) + 0.5);
    double top = 0, below = 0;
    for (std::size_t s = 0; s < chart.series.size(); ++s) {
      const double value = chart.series[s].values[i];
      const double base = chart.stacked ? below : 0;
      const double x = middle - used / 2 + (chart.stacked ? 0 : static_cast<double>(s) * bar);
      if (value > 0) {
        svg.rect(x, frame.y(base + value), bar, frame.y(base) - frame.y(base + value), fills[s],
                 R"(stroke="#666666" stroke-width="0.6")");
      }
      below += value;
      top = std::max(top, base + value);
    }
    if (i % every == 0) {
      const double width_left = slot * static_cast<double>(every) + 4;
      double line = frame.base + 19;
      for (std::string_view rest = chart.labels[i]; !rest.empty(); line += 16) {
        const std::size_t end = std::min(rest.find('\n'), rest.size());
        svg.text(middle, line, shortened(rest.substr(0, end), width_left), R"(text-anchor="middle")");
        rest.remove_prefix(std::min(end + 1, rest.size()));
      }
    }
    if (!chart.notes.empty() && (i % every == 0)) {
      svg.text(middle, frame.y(top) - 6, chart.notes[i], R"(text-anchor="middle" font-size="11")");
    }
  }
  draw_x_name(svg, frame, chart.x_label);
  draw_legend(svg, frame, chart.series, fills, chart.stacked);
  return svg.finish();
}

namespace {

/// The marks of a logarithmic axis, with positions as powers of two: from the last round number that is not
/// above `low` to the first that is not below `high`, and at least two. Round numbers are 1, 2 and 5 times
/// powers of ten; over many decades only the powers, and over less than one also 1.5, 3 and 7.
Ticks decimal_marks(double low, double high) {
  Ticks marks;
  const auto add = [&](double value) {
    marks.values.push_back(std::log2(value));
    marks.labels.push_back(fmt::format("{:.6g}", value));
  };
  const double range = high / low;
  double before = 0;
  for (int exponent = static_cast<int>(std::floor(std::log10(low))) - 1;; ++exponent) {
    for (const double factor : {1.0, 1.5, 2.0, 3.0, 5.0, 7.0}) {
      if (range > 2e3 && factor != 1) continue;
      if (range > 10 && factor != 1 && factor != 2 && factor != 5) continue;
      const double value = factor * std::pow(10.0, exponent);
      if (value <= low) {
        before = value;
        continue;
      }
      if (marks.values.empty()) add(before);
      add(value);
      if (value >= high) return marks;
    }
  }
}

void draw_point(Svg& svg, const LineSeries& series, double x, double y) {
  constexpr double half = 4.5;
  std::string d;
  switch (series.shape) {
    case Shape::circle:
      d = fmt::format("M{} {}a{r} {r} 0 1 0 {w} 0a{r} {r} 0 1 0 -{w} 0z", at(x - half), at(y),
                      fmt::arg("r", at(half)), fmt::arg("w", at(2 * half)));
      break;
    case Shape::square:
      d = fmt::format("M{} {}h{w}v{w}h-{w}z", at(x - half + 0.5), at(y - half + 0.5),
                      fmt::arg("w", at(2 * half - 1)));
      break;
    case Shape::triangle:
      d = fmt::format("M{} {}l{} {}h-{}z", at(x), at(y - half - 1), at(half + 1), at(2 * half),
                      at(2 * half + 2));
      break;
    case Shape::diamond:
      d = fmt::format("M{} {}l{w} {w}l-{w} {w}l-{w} -{w}z", at(x), at(y - half - 1),
                      fmt::arg("w", at(half + 1)));
      break;
  }
  svg.path(d, series.hollow ? fmt::format(R"(fill="none" stroke="{}" stroke-width="2")", series.color)
                            : fmt::format(R"(fill="{}" stroke="#ffffff" stroke-width="0.8")", series.color));
}

/// Draws the range from the lowest to the highest of a point's repeats.
void draw_range(Svg& svg, const LineSeries& series, double x, double low, double high) {
  svg.line(x, low, x, high, series.color, R"(stroke-width="1.5")");
  for (const double y : {low, high}) svg.line(x - 5, y, x + 5, y, series.color, R"(stroke-width="1.5")");
}

/// A row of the names of lines above the plot.
void draw_line_legend(Svg& svg, Frame& frame, const std::vector<const LineSeries*>& entries) {
  if (entries.empty()) return;
  double x = frame.x0;
  const double y = frame.top + 8;
  for (const LineSeries* entry : entries) {
    if (entry->joined || entry->dashed) {
      svg.line(x, y, x + 24, y, entry->color,
               entry->dashed ? R"(stroke-width="2" stroke-dasharray="6 4")" : R"(stroke-width="2")");
    }
    if (!entry->dashed) draw_point(svg, *entry, x + 12, y);
    svg.text(x + 30, y + 4, entry->name);
    x += 30 + static_cast<double>(entry->name.size()) * letter + 22;
  }
  frame.top += 26;
}

/// The texts beside the last points, moved apart if they would touch.
void draw_ends(Svg& svg, const Frame& frame, std::vector<Mark> ends) {
  constexpr double apart = 15;
  std::sort(ends.begin(), ends.end(), [](const Mark& a, const Mark& b) { return a.y < b.y; });
  double last = -INFINITY;
  for (Mark& end : ends) {
    end.y = std::max(end.y, last + apart);
    last = end.y;
  }
  // Labels that went below the plot are moved up again, and move those above them.
  double next = frame.base + apart;
  for (auto end = ends.rbegin(); end != ends.rend(); ++end) {
    end->y = std::min(end->y, next - apart);
    next = end->y;
  }
  for (const Mark& end : ends) svg.text(end.x + 12, end.y + 4, end.label, R"(font-weight="bold")");
}

}  // namespace

std::string to_svg(const LineChart& chart) {
  require(!chart.series.empty(), "a line chart without lines");
  double low_x = INFINITY, high_x = -INFINITY, low_y = INFINITY, high_y = -INFINITY;
  for (const LineSeries& series : chart.series) {
    require(!series.x.empty() && series.x.size() == series.y.size(), "a line whose x and y differ in length");
    require(usable(series.x) && usable(series.y) && usable(series.low) && usable(series.high),
            "a value that is negative or not finite");
    require(series.low.size() == series.high.size() &&
                (series.low.empty() || series.low.size() == series.y.size()),
            "ranges of some of a line's points only");
    for (std::size_t i = 0; i < series.x.size(); ++i) {
      const double low = series.low.empty() ? series.y[i] : series.low[i];
      require(!chart.logarithmic || (series.x[i] > 0 && std::min(low, series.y[i]) > 0),
              "a zero on a logarithmic axis");
      low_x = std::min(low_x, series.x[i]);
      high_x = std::max(high_x, series.x[i]);
      low_y = std::min({low_y, series.y[i], low});
      high_y = std::max({high_y, series.y[i], series.high.empty() ? series.y[i] : series.high[i]});
    }
  }
  const bool log_x = chart.logarithmic || chart.logarithmic_x;
  require(!log_x || low_x > 0, "a zero on a logarithmic axis");
  const auto place_x = [&](double value) { return log_x ? std::log2(value) : value; };
  const auto place_y = [&](double value) { return chart.logarithmic ? std::log2(value) : value; };
  const auto powers = [&](double low, double high, Scale scale) {
    Ticks marks;
    const double first = std::floor(std::log2(low)), last = std::max(std::ceil(std::log2(high)), first + 1);
    const double step = std::max(1.0, std::ceil((last - first) / 10));
    for (double p = first; p < last + step; p += step) {
      const double value = std::exp2(p);
      marks.values.push_back(p);
      marks.labels.push_back(scale == Scale::bytes ? ticks(0, value, scale, 1).labels.back()
                                                   : fmt::format("{:.6g}", value));
    }
    return marks;
  };
  Ticks vertical = !chart.logarithmic              ? ticks(0, high_y, chart.y_scale)
                   : chart.y_scale == Scale::bytes ? powers(low_y, high_y, chart.y_scale)
                                                   : decimal_marks(low_y, high_y);
  const Ticks horizontal = log_x ? powers(low_x, high_x, Scale::number) : ticks(0, high_x, Scale::number, 10);
  std::vector<std::string> ends;
  std::vector<const LineSeries*> entries;
  for (const LineSeries& series : chart.series) {
    if (!series.name.empty()) entries.push_back(&series);
    if (!series.end.empty()) ends.push_back(fmt::format("{} ends at {:.6g}", series.end, series.y.back()));
  }
  for (const LineSeries& entry : chart.legend) entries.push_back(&entry);
  Svg svg(chart.title, chart.subtitle, description("Lines", chart.x_label, chart.series, ends));
  Frame frame;
  draw_line_legend(svg, frame, entries);
  frame.low_x = horizontal.values.front();
  frame.high_x = horizontal.values.back();
  for (const Band& band : chart.bands) {
    const double begin = std::clamp(frame.x(place_x(band.begin)), frame.x0, frame.x1);
    const double end = std::clamp(frame.x(place_x(band.end)), frame.x0, frame.x1);
    if (end - begin < 0.3) continue;
    svg.rect(begin, frame.top, end - begin, frame.base - frame.top,
             band.color.empty() ? "#f2f2f2" : band.color);
    svg.text((begin + end) / 2, frame.top + 16, shortened(band.label, end - begin),
             R"(text-anchor="middle" fill="#555555")");
  }
  const double floor_y = vertical.values.front();
  for (double& value : vertical.values) value -= floor_y;
  frame.high_y = vertical.values.back();
  draw_y_axis(svg, frame, vertical, chart.y_label);
  for (std::size_t i = 0; i < horizontal.values.size(); ++i) {
    const double x = frame.x(horizontal.values[i]);
    svg.line(x, frame.base, x, frame.base + 5, ink);
    svg.text(x, frame.base + 19, horizontal.labels[i], R"(text-anchor="middle")");
  }
  draw_x_name(svg, frame, chart.x_label);
  int dashed = 0;
  std::vector<Mark> labels;
  for (const LineSeries& series : chart.series) {
    std::string d;
    // Dashed lines that overlap show alternately.
    const std::string dashes =
        series.dashed ? fmt::format(R"( stroke-dasharray="6 8" stroke-dashoffset="{}")", 7 * dashed++) : "";
    const auto height_of = [&](double value) { return frame.y(place_y(value) - floor_y); };
    for (std::size_t i = 0; i < series.x.size(); ++i) {
      d += fmt::format("{}{} {}", i == 0 ? "M" : "L", at(frame.x(place_x(series.x[i]))),
                       at(height_of(series.y[i])));
    }
    if (series.joined || series.dashed) {
      svg.path(d, fmt::format(R"(fill="none" stroke="{}" stroke-width="2"{})", series.color, dashes));
    }
    for (std::size_t i = 0; i < series.x.size() && !series.dashed; ++i) {
      const double x = frame.x(place_x(series.x[i]));
      if (!series.low.empty() && series.high[i] > series.low[i]) {
        draw_range(svg, series, x, height_of(series.low[i]), height_of(series.high[i]));
      }
      draw_point(svg, series, x, height_of(series.y[i]));
    }
    if (!series.end.empty()) {
      labels.push_back({frame.x(place_x(series.x.back())), height_of(series.y.back()), series.end});
    }
  }
  draw_ends(svg, frame, std::move(labels));
  return svg.finish();
}

}  // namespace tranche::plot
