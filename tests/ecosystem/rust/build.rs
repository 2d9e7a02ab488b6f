//! Writes the stubs: SLUICE_PROTOS is the folder of the contracts.
use std::{env, error::Error, fs};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = env::var("SLUICE_PROTOS")?;
    let mut files = Vec::new();
    for entry in fs::read_dir(format!("{folder}/sluice/v1"))? {
        files.push(entry?.path());
    }
    tonic_build::configure().compile_protos(&files, &[folder])?;
    Ok(())
}
