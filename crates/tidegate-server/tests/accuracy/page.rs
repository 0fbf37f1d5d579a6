use std::fmt;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::form::Form;
use crate::oracle::{Figures, Part};
use crate::real_time::{Measured, Outage, Outcome};
use crate::traffic::{LOADS, name};
use crate::virtual_time::{Change, Fault, Run};
use crate::{Place, Table};
use tidegate_tools::simulate::load::LoadKind;

/// Text of the page, with a line for each table.
pub(crate) const TEMPLATE: &str = include_str!("page.md");
/// Line after a table.
const END: &str = "<!-- end -->";

/// Row of a table in virtual time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowName {
    pub(crate) table: Table,
    pub(crate) form: Form,
    pub(crate) load: LoadKind,
    pub(crate) place: Place,
}

impl fmt::Display for RowName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { table, form, load, place } = self;
        write!(formatter, "{table:?}, {form}, {}, {}", name(*load), place.name())
    }
}

/// The page as it is in the repository.
pub(crate) struct Page {
    /// Text without the generated tables.
    pub(crate) text: String,
    /// Names and lines of the tables.
    tables: Vec<(String, String)>,
}

impl Page {
    pub(crate) fn read() -> Self {
        let page = std::fs::read_to_string(path()).expect("docs/accuracy.md");
        let (mut text, mut tables) = (String::new(), Vec::new());
        let mut is_inside = false;
        for line in page.lines() {
            if line == END {
                is_inside = false;
            }
            if is_inside {
                let (_, lines): &mut (_, String) = tables.last_mut().expect("inside of a table");
                let _ = writeln!(lines, "{line}");
                continue;
            }
            let _ = writeln!(text, "{line}");
            if let Some(marker) = line.strip_prefix("<!-- table ") {
                tables.push((marker.trim_end_matches(" -->").to_owned(), String::new()));
                is_inside = true;
            }
        }
        Self { text, tables }
    }

    /// Returns the lines of a table.
    pub(crate) fn table(&self, name: &str) -> &str {
        self.tables.iter().find(|(of, _)| of == name).map_or("", |(_, lines)| lines.trim())
    }

    /// Returns the cells of a row between the load and the stores.
    pub(crate) fn cells_of(&self, row: RowName) -> Option<&str> {
        let start = format!("| {} | {} | ", row.form, name(row.load));
        let lines = self.table(&format!("{:?}", row.table)).lines();
        let cells = lines.filter_map(|line| line.strip_prefix(&start)?.strip_suffix(" |"));
        let mut rows = cells.filter_map(|cells| cells.rsplit_once(" | "));
        let has_store =
            |stores: &str| stores == "all" || stores.split(", ").any(|one| one == row.place.name());
        rows.find(|(_, stores)| has_store(stores)).map(|(cells, _)| cells)
    }
}

fn path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/accuracy.md")
}

/// Figures of a row: of one run, or of one per other algorithm that it changes to.
pub(crate) struct Row {
    pub(crate) name: RowName,
    pub(crate) runs: Vec<(Run, Figures)>,
}

impl Row {
    /// Returns the cells between the load and the stores.
    pub(crate) fn cells(&self) -> String {
        if let [(_, figures)] = &self.runs[..] {
            return format!(
                "{} | {} | {} | {} | {}",
                window(figures.worst_window),
                figures.over.percent(),
                figures.under.percent(),
                share(figures.wrongly_admitted, figures.requests),
                share(figures.wrongly_denied, figures.requests),
            );
        }
        let worst_window =
            self.runs.iter().map(|(_, figures)| figures.worst_window).fold(Part::NONE, Part::max);
        let (over, under) =
            (self.worst(|figures| figures.over), self.worst(|figures| figures.under));
        format!("{} | {over} | {under}", window(worst_window))
    }

    /// Returns the largest figure, with the first algorithm whose change leads to it.
    fn worst(&self, part: fn(&Figures) -> Part) -> String {
        let worst = self.runs.iter().rev().max_by_key(|(_, figures)| part(figures).units);
        let (run, figures) = worst.expect("several runs");
        let percent = part(figures).percent();
        match new_form(*run) {
            Some(form) if part(figures).units > 0 => format!("{percent}, to {form}"),
            _ => percent,
        }
    }
}

/// Returns the algorithm that a run changes to.
fn new_form(run: Run) -> Option<Form> {
    match run.fault {
        Fault::Rollout(Change::Form(form)) => Some(form),
        _ => None,
    }
}

fn window(part: Part) -> String {
    format!("{} of {}", part.units, part.limit)
}

/// Returns a share of all requests in percent.
fn share(part: u64, all: u64) -> String {
    if part == 0 {
        return "0 %".to_owned();
    }
    let hundredths = (part * 10_000 + all / 2) / all;
    format!("{}.{:02} %", hundredths / 100, hundredths % 100)
}

/// Writes the page.
pub(crate) fn write(rows: &[Row], many_clients: &[(Form, Figures)], outages: &[(Outage, Outcome)]) {
    let mut page = TEMPLATE.to_owned();
    for table in Table::ALL {
        insert(&mut page, &format!("{table:?}"), &virtual_table(table, rows));
    }
    insert(&mut page, "EachChange", &table_of_changes(rows));
    insert(&mut page, "ManyClients", &table_of_many_clients(many_clients));
    for (outage, outcome) in outages {
        insert(&mut page, &format!("{outage:?}"), &outage_table(outcome));
    }
    std::fs::write(path(), page).expect("docs/accuracy.md is written");
}

fn insert(page: &mut String, marker: &str, table: &str) {
    let line = format!("<!-- table {marker} -->\n");
    assert!(page.contains(&line), "page.md has no {marker}");
    *page = page.replace(&line, &format!("{line}\n{table}\n"));
}

fn header(columns: &[&str]) -> String {
    format!("| {} |\n|{}\n", columns.join(" | "), " --- |".repeat(columns.len()))
}

/// Returns a table in which stores with the same figures share a row.
fn virtual_table(table: Table, rows: &[Row]) -> String {
    let mut columns =
        vec!["algorithm", "load", "worst window", "over-admission", "under-admission"];
    if table != Table::AlgorithmChanges {
        columns.extend(["wrongly admitted", "wrongly denied"]);
    }
    columns.push("stores");
    let mut text = header(&columns);
    for form in Form::ALL {
        for load in LOADS {
            let mut groups: Vec<(String, Vec<Place>)> = Vec::new();
            for place in Place::ALL {
                let name = RowName { table, form, load, place };
                let cells = rows.iter().find(|row| row.name == name).expect("each row").cells();
                match groups.iter_mut().find(|(same, _)| *same == cells) {
                    Some((_, places)) => places.push(place),
                    None => groups.push((cells, vec![place])),
                }
            }
            for (cells, places) in groups {
                let names: Vec<&str> = places.iter().map(|place| place.name()).collect();
                let is_all = places.len() == Place::ALL.len();
                let stores = if is_all { "all".to_owned() } else { names.join(", ") };
                let _ = writeln!(text, "| {form} | {} | {cells} | {stores} |", name(load));
            }
        }
    }
    text
}

/// Returns the over-admission of each change of the algorithm: the worst of all loads and stores.
fn table_of_changes(rows: &[Row]) -> String {
    let names: Vec<String> = Form::ALL.iter().map(Form::to_string).collect();
    let mut columns = vec!["from, to"];
    columns.extend(names.iter().map(String::as_str));
    let mut text = header(&columns);
    for from in Form::ALL {
        let _ = write!(text, "| {from} |");
        for to in Form::ALL {
            let is_run = |run: &Run| run.form == from && new_form(*run) == Some(to);
            let runs = rows.iter().flat_map(|row| &row.runs).filter(|(run, _)| is_run(run));
            let worst = runs.map(|(_, figures)| figures.over).reduce(Part::max);
            let _ = write!(text, " {} |", worst.map_or_else(|| "–".to_owned(), Part::percent));
        }
        text.push('\n');
    }
    text
}

pub(crate) fn table_of_many_clients(rows: &[(Form, Figures)]) -> String {
    let mut text = header(&["algorithm", "wrong decisions", "over-admission", "under-admission"]);
    for (form, figures) in rows {
        let wrong = share(figures.wrongly_admitted + figures.wrongly_denied, figures.requests);
        let (over, under) = (figures.over.percent(), figures.under.percent());
        let _ = writeln!(text, "| {form} | {wrong} | {over} | {under} |");
    }
    text
}

/// Returns a table with the spread over the runs.
fn outage_table(outcome: &Outcome) -> String {
    let mut text = header(&[
        "algorithm",
        "load",
        "Redis: worst window",
        "over-admission",
        "under-admission",
        "cluster: worst window",
        "over-admission",
        "under-admission",
    ]);
    for form in Form::ALL {
        for load in LOADS {
            let cells = |place| {
                let is_row =
                    |row: &&Measured| (row.form, row.load, row.place) == (form, load, place);
                let row = outcome.rows.iter().find(is_row).expect("each row");
                let worst =
                    spread(row, |figures| figures.worst_window, |part| part.units.to_string());
                let over = spread(row, |figures| figures.over, Part::percent);
                let under = spread(row, |figures| figures.under, Part::percent);
                format!("{worst} | {over} | {under}")
            };
            let (redis, cluster) = (cells(Place::Redis), cells(Place::Cluster));
            let _ = writeln!(text, "| {form} | {} | {redis} | {cluster} |", name(load));
        }
    }
    for (place, local) in &outcome.local {
        let percent = 100.0 * local;
        let _ =
            write!(text, "\nThe fallback decided {percent:.0} % of the requests of the runs on ");
        let _ = writeln!(text, "{}.", if *place == Place::Redis { "Redis" } else { "the cluster" });
    }
    text
}

/// Returns the smallest and the largest figure.
fn spread(row: &Measured, part: fn(&Figures) -> Part, shown: fn(Part) -> String) -> String {
    let smallest = row.runs.iter().map(part).min_by_key(|part| part.units).expect("a run");
    let largest = row.runs.iter().map(part).max_by_key(|part| part.units).expect("a run");
    if smallest.units == largest.units {
        return shown(largest);
    }
    format!("{} – {}", shown(smallest).trim_end_matches(" %"), shown(largest))
}
