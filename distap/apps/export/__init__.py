"""A trained network in the forms that other programs load, each held to the network before it is handed out."""

from distap.apps.export.programs import Format, parse_formats
from distap.apps.export.to_folder import Exported, ExportSettings, export_to_folder, installed_formats

__all__ = ["ExportSettings", "Exported", "Format", "export_to_folder", "installed_formats", "parse_formats"]
