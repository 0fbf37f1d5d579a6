//! The picture of a report: requests over time, and the units of the busiest key in any window with
//! the limit as a line. It follows the colour scheme of the reader, light or dark.

#![expect(clippy::cast_precision_loss, reason = "coordinates have one decimal")]

use std::fmt::Write as _;
use std::time::Duration;

use tidegate::Timestamp;
use tidegate_config::duration::readable;

use super::report::{SimulationReport, limit, utc};
use super::series::{Bin, Series};
use super::tally::PolicyTally;
use crate::tool::table::html as escaped;
use crate::tool::text::grouped;
use tidegate_api::duration;

const WIDTH: f64 = 860.0;
const LEFT: f64 = 64.0;
const PLOT_WIDTH: f64 = WIDTH - LEFT - 20.0;
/// Heights of the parts of a panel.
const TITLE: f64 = 40.0;
const REQUESTS: f64 = 96.0;
const GAP: f64 = 18.0;
const WINDOW: f64 = 72.0;
const AXIS: f64 = 34.0;
const PANEL: f64 = TITLE + REQUESTS + GAP + WINDOW + AXIS;
const HEADER: f64 = 58.0;
/// Maximum number of policies that are drawn: those with most requests.
const MAX_PANELS: usize = 8;
/// Maximum number of bars in a panel, so that a picture has some kilobytes.
const MAX_BARS: u64 = 320;
/// Maximum number of boundaries between windows that are drawn.
const MAX_BOUNDARIES: u64 = 40;
/// Maximum number of times on the axis, and the steps between them, in milliseconds.
const MAX_TICKS: u64 = 8;
const TICK_STEPS: [u64; 24] = [
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 120_000,
    300_000, 600_000, 1_800_000, 3_600_000, 7_200_000, 14_400_000, 43_200_000, 86_400_000,
];
/// Further steps, in days.
const TICK_DAYS: [u64; 3] = [2, 10, 100];

/// Colours in dark mode. Those of light mode are attributes, because renderers without variables or
/// style sheets, such as librsvg, would draw black on black.
pub(crate) const STYLE: &str = "\
@media(prefers-color-scheme:dark){.back{fill:#0d1117}text{fill:#e6edf3}.muted{fill:#9198a1}\
.grid{stroke:#3d444d}.boundary{stroke:#9198a1}.admitted{fill:#3fb950}.denied{fill:#f85149}\
.over{fill:#f0883e}.limit{stroke:#a371f7}.limit-text{fill:#a371f7}}";

/// Returns the attributes of an element with these classes.
pub(crate) fn paint(classes: &str) -> String {
    let mut attributes = format!("class=\"{classes}\"");
    for class in classes.split(' ') {
        attributes += match class {
            "back" => " fill=\"#ffffff\"",
            "title" => " font-weight=\"600\" font-size=\"14\"",
            "muted" => " fill=\"#59636e\"",
            "end" => " text-anchor=\"end\"",
            "middle" => " text-anchor=\"middle\"",
            "grid" => " stroke=\"#d1d9e0\"",
            "admitted" => " fill=\"#2da44e\"",
            "denied" => " fill=\"#cf222e\"",
            "over" => " fill=\"#bf5700\"",
            "limit" => " stroke=\"#8250df\" stroke-width=\"1.5\" stroke-dasharray=\"6 4\"",
            "limit-text" => " fill=\"#8250df\"",
            "boundary" => " stroke=\"#59636e\" stroke-dasharray=\"1 3\"",
            _ => "",
        };
    }
    attributes
}

/// Starts a picture of this size, whose texts are dark by default.
pub(crate) fn start_picture(width: f64, height: f64, title: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         width=\"{width}\" height=\"{height}\" role=\"img\" fill=\"#1f2328\" \
         font-family=\"system-ui,sans-serif\" font-size=\"12\">\n<title>{}</title>\n\
         <style>{STYLE}</style>\n<rect {} width=\"100%\" height=\"100%\"/>\n",
        escaped(title),
        paint("back")
    )
}

/// One policy of one configuration.
struct Panel<'r> {
    title: String,
    tally: &'r PolicyTally,
    series: Series,
}

/// Scale of all panels, so that they can be compared.
#[derive(Clone, Copy)]
struct Scale {
    /// Start of the traffic, in microseconds since the Unix epoch.
    start: u64,
    /// Microseconds that are the full width.
    span: u64,
    /// Whether the times of the axis are those of a log, not those since the start.
    is_dated: bool,
    /// Requests of a bin that are the full height.
    highest: u64,
    /// Thousandths of a limit that are the full height.
    peak: u64,
}

/// Returns the picture of a report.
pub fn draw(report: &SimulationReport) -> String {
    let (start, end) = report.traffic.period();
    let span = (end - start).max(1);
    let panels = panels(report, span);
    let height = HEADER + PANEL * panels.len() as f64;
    let title = format!("{} requests", grouped(report.traffic.requests));
    let (first, last) = report.traffic.times.unwrap_or_default();
    let period = format!("{title}, {} to {}", utc(first), utc(last));
    let mut svg = start_picture(WIDTH, height, &period);
    text(&mut svg, LEFT, 22.0, "muted", &period);
    let mut x = LEFT;
    for (class, name, width) in [
        ("admitted", "admitted", 88.0),
        ("denied", "denied", 74.0),
        ("over", "above the limit", 124.0),
    ] {
        let class = paint(class);
        // Writing to a string never fails.
        let _ = writeln!(svg, "<rect {class} x=\"{x}\" y=\"34\" width=\"10\" height=\"10\"/>");
        text(&mut svg, x + 15.0, 43.0, "muted", name);
        x += width;
    }
    if panels.iter().any(|panel| panel.boundaries(start, span).next().is_some()) {
        vertical(&mut svg, x + 4.0, 32.0, 46.0);
        text(&mut svg, x + 12.0, 43.0, "muted", "start of a window of the clock");
    }
    let scale = Scale {
        start,
        span,
        is_dated: report.traffic.generated.is_none(),
        highest: panels.iter().map(Panel::highest).max().unwrap_or(1),
        peak: panels.iter().map(Panel::peak).max().unwrap_or(0).max(1_000),
    };
    for (number, panel) in panels.iter().enumerate() {
        panel.draw(&mut svg, HEADER + PANEL * number as f64, scale);
    }
    svg.push_str("</svg>\n");
    svg
}

/// Returns the panels, with bins of the same width. `span` is the length of the traffic.
fn panels(report: &SimulationReport, span: u64) -> Vec<Panel<'_>> {
    let has_variants = report.runs.len() > 1;
    let mut panels = Vec::new();
    for run in &report.runs {
        let has_policies = run.counts.policies.len() > 1;
        for tally in run.counts.policies.iter().filter(|tally| tally.requests > 0) {
            let name = match (has_variants, has_policies) {
                (true, false) => run.name.clone(),
                (true, true) => format!("{} · {}", run.name, tally.name),
                (false, _) => tally.name.clone(),
            };
            let title = match tally.quota.algorithm().as_str() {
                algorithm if algorithm == name => name,
                algorithm => format!("{name} · {algorithm}"),
            };
            let title = if tally.is_shadow { title + " · shadow mode" } else { title };
            panels.push(Panel { title, tally, series: tally.series.clone() });
        }
    }
    if panels.len() > MAX_PANELS {
        let mut requests: Vec<u64> = panels.iter().map(|panel| panel.tally.requests).collect();
        requests.sort_unstable_by(|a, b| b.cmp(a));
        let least = requests[MAX_PANELS - 1];
        panels.retain(|panel| panel.tally.requests >= least);
        panels.truncate(MAX_PANELS);
    }
    let widest = panels.iter().map(|panel| panel.series.width).max().unwrap_or_default();
    let is_accepted = |width| width >= widest && span.div_ceil(width) <= MAX_BARS;
    for panel in &mut panels {
        panel.series.widen_until(is_accepted);
    }
    panels
}

impl Panel<'_> {
    /// Returns the most requests in a bin.
    fn highest(&self) -> u64 {
        let requests = |bin: &Bin| bin.admitted + bin.denied;
        self.series.bins.iter().map(requests).max().unwrap_or(0).max(1)
    }

    /// Returns the highest part of a limit that was admitted, in thousandths.
    fn peak(&self) -> u64 {
        self.series.bins.iter().map(|bin| bin.peak).max().unwrap_or(0)
    }

    /// Returns the times after the start at which a window of the clock or of a calendar begins,
    /// unless there are too many to draw.
    fn boundaries(&self, start: u64, span: u64) -> impl Iterator<Item = u64> {
        let quota = &self.tally.quota;
        let window = duration::micros(quota.window()).max(1);
        let next = move |time: u64| match quota.calendar() {
            Some(calendar) => calendar.period_at(Timestamp::from_micros(time)).1.as_micros(),
            None => (time + 1).next_multiple_of(window),
        };
        let is_drawn = span / window <= MAX_BOUNDARIES;
        let times =
            std::iter::successors(is_drawn.then(|| next(start)), move |time| Some(next(*time)));
        times.map(move |time| time - start).take_while(move |time| *time < span)
    }

    fn draw(&self, svg: &mut String, top: f64, scale: Scale) {
        let Scale { start, span, is_dated, highest, peak } = scale;
        let Self { title, tally, series } = self;
        let quota = limit(&tally.quota);
        text(svg, LEFT, top + 16.0, "title", title);
        let counts = format!(
            "{} admitted, {} denied, {} above and {} below the exact log",
            grouped(tally.admitted),
            grouped(tally.denied),
            grouped(tally.over),
            grouped(tally.under)
        );
        text(svg, LEFT, top + 32.0, "muted", &counts);
        let bins = &series.bins;
        let bin_count = span.div_ceil(series.width).max(bins.len() as u64);
        let step = PLOT_WIDTH / bin_count as f64;
        let time_scale = PLOT_WIDTH / (bin_count * series.width) as f64;
        for time in self.boundaries(start, span) {
            let x = LEFT + time as f64 * time_scale;
            vertical(svg, x, top + TITLE, top + PANEL - AXIS);
        }

        let base = top + TITLE + REQUESTS;
        let scale = REQUESTS / highest as f64;
        horizontal(svg, "grid", base);
        let per_second = highest as f64 * 1e6 / series.width as f64;
        text(svg, LEFT - 6.0, base - REQUESTS + 10.0, "muted end", &rounded(per_second));
        text(svg, LEFT - 6.0, base - REQUESTS + 24.0, "muted end", "per s");
        // Admitted requests cover the lower part of the bars behind them.
        let requests = |bin: &Bin| if bin.denied > 0 { bin.admitted + bin.denied } else { 0 };
        bars(svg, "denied", bins, step, base, |bin| requests(bin) as f64 * scale);
        bars(svg, "admitted", bins, step, base, |bin| bin.admitted as f64 * scale);

        let base = base + GAP + WINDOW;
        // Room for the caption.
        let scale = (WINDOW - 14.0) / peak as f64;
        let line = base - 1_000.0 * scale;
        horizontal(svg, "grid", base);
        let over = |bin: &Bin| if bin.peak > 1_000 { bin.peak } else { 0 };
        bars(svg, "over", bins, step, base, |bin| over(bin) as f64 * scale);
        bars(svg, "admitted", bins, step, base, |bin| bin.peak.min(1_000) as f64 * scale);
        horizontal(svg, "limit", line);
        text(svg, LEFT - 6.0, line + 4.0, "muted end", &rounded(tally.quota.limit() as f64));
        let caption = base - WINDOW + 6.0;
        text(svg, LEFT, caption, "limit-text", &format!("limit {quota}"));
        let units = "units of the busiest key in any window";
        text(svg, LEFT + PLOT_WIDTH, caption, "muted end", units);

        let milliseconds = span / 1_000;
        let days = TICK_DAYS.map(|days| days * 86_400_000);
        let mut steps = TICK_STEPS.into_iter().chain(days);
        let step = steps.find(|step| milliseconds / step < MAX_TICKS);
        let step = step.unwrap_or(milliseconds.max(1));
        let first = if is_dated { (start / 1_000).next_multiple_of(step) * 1_000 } else { start };
        let mut day = String::new();
        for tick in (first..=start + span).step_by(usize::try_from(step * 1_000).unwrap_or(1)) {
            let x = LEFT + (tick - start) as f64 * time_scale;
            let class = if tick == start { "muted" } else { "muted middle" };
            let label = if is_dated {
                date_label(tick, step, &mut day)
            } else {
                readable(Duration::from_micros(tick - start))
            };
            text(svg, x, base + 16.0, class, &label);
        }
    }
}

/// Returns the label of a time on an axis with this step in milliseconds: the day where it differs
/// from that of the label before, and the time of day unless the step is in days.
fn date_label(micros: u64, step: u64, day: &mut String) -> String {
    let time = jiff::Timestamp::from_microsecond(i64::try_from(micros).unwrap_or(0));
    let time = time.unwrap_or_default();
    let date = time.strftime("%b %-d").to_string();
    let clock = match step {
        step if step >= 86_400_000 => return date,
        step if step >= 60_000 => "%H:%M",
        step if step >= 1_000 => "%H:%M:%S",
        _ => "%H:%M:%S%.3f",
    };
    let clock = time.strftime(clock).to_string();
    if *day == date {
        return clock;
    }
    let label = format!("{date} {clock}");
    *day = date;
    label
}

/// Draws a bar for each bin, as the outline of all of them. `height` is that above the base.
fn bars(
    svg: &mut String,
    class: &str,
    bins: &[Bin],
    step: f64,
    base: f64,
    height: impl Fn(&Bin) -> f64,
) {
    let mut path = String::new();
    let mut drawn = base;
    // One more bin ends the outline.
    for number in 0..=bins.len() {
        let height = bins.get(number).map_or(0.0, &height);
        // A bar of less than half a pixel would be invisible.
        let y = if height > 0.0 { base - height.max(0.5) } else { base };
        if short(y) == short(drawn) {
            continue;
        }
        let x = short(LEFT + number as f64 * step);
        match (short(drawn) == short(base), y < base) {
            (true, _) => _ = write!(path, "M{x} {}V{}", short(base), short(y)),
            (false, true) => _ = write!(path, "H{x}V{}", short(y)),
            (false, false) => _ = write!(path, "H{x}V{}z", short(base)),
        }
        drawn = y;
    }
    if !path.is_empty() {
        let _ = writeln!(svg, "<path {} d=\"{path}\"/>", paint(class));
    }
}

/// Formats a coordinate with at most one decimal.
pub(crate) fn short(number: f64) -> String {
    let text = format!("{number:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// Draws the boundary between two windows.
fn vertical(svg: &mut String, x: f64, top: f64, bottom: f64) {
    let (x, top, bottom) = (short(x), short(top), short(bottom));
    let _ = writeln!(svg, "<path {} d=\"M{x} {top}V{bottom}\"/>", paint("boundary"));
}

fn horizontal(svg: &mut String, class: &str, y: f64) {
    let end = LEFT + PLOT_WIDTH;
    let _ = writeln!(
        svg,
        "<line {} x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{end}\" y2=\"{y:.1}\"/>",
        paint(class)
    );
}

pub(crate) fn text(svg: &mut String, x: f64, y: f64, class: &str, text: &str) {
    let text = escaped(text);
    let _ = writeln!(svg, "<text {} x=\"{x:.1}\" y=\"{y:.1}\">{text}</text>", paint(class));
}

/// Formats a number with about three digits.
fn rounded(number: f64) -> String {
    match number {
        n if n >= 1e9 => format!("{:.1}G", n / 1e9),
        n if n >= 1e6 => format!("{:.1}M", n / 1e6),
        n if n >= 1e4 => format!("{:.0}k", n / 1e3),
        n if n >= 10.0 || n.fract() == 0.0 => format!("{n:.0}"),
        n => format!("{n:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped_for_xml() {
        assert_eq!(
            escaped("a<b>&\"c\"\u{1b}\u{ffff}ü"),
            "a&lt;b&gt;&amp;&quot;c&quot;\u{fffd}\u{fffd}ü"
        );
    }

    #[test]
    fn numbers_are_short() {
        let numbers = [0.25, 7.0, 99.6, 12_345.0, 2_500_000.0].map(rounded);
        assert_eq!(numbers, ["0.25", "7", "100", "12k", "2.5M"]);
        assert_eq!([1.0, 1.04, 1.06, 250.25].map(short), ["1", "1", "1.1", "250.2"]);
    }

    #[test]
    fn bars_of_equal_height_are_one_outline() {
        let bins = [0, 2, 2, 5, 0, 0, 1].map(|admitted| Bin { admitted, ..Bin::default() });
        let mut svg = String::new();
        bars(&mut svg, "admitted", &bins, 10.0, 100.0, |bin| bin.admitted as f64);
        let outlines = "M74 100V98H94V95H104V100zM124 100V99H134V100z";
        assert_eq!(svg, format!("<path {} d=\"{outlines}\"/>\n", paint("admitted")));
    }
}
